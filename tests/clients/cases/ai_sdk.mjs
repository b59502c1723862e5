// Vercel's AI SDK, with its provider for servers like this one.

import { apiKey, baseURL, citySchema, expect, model, question, run } from "./harness.mjs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "apt-jax",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const short = { model: provider(model), prompt: question, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const long = { ...short, maxOutputTokens: 80 };
const noteCity = tool({ description: "Note a city", inputSchema: jsonSchema(citySchema) });
const oneCall = { ...long, tools: { note_city: noteCity }, toolChoice: "required" };

function expectCity(found) {
  expect(Object.keys(found).sort().join() === "city,people", found);
}

async function textOf(made) {
  let text = "";
  for await (const piece of made.textStream) text += piece;
  return text;
}

await run({
  async chat() {
    const made = await generateText({ ...short, instructions: "Be brief." });
    expect(made.text && made.usage.outputTokens > 1 && made.finishReason, made.text);
  },
  async streams() {
    const made = streamText(short);
    const text = await textOf(made);
    expect(text && text === (await generateText(short)).text, text);
    expect((await made.usage).outputTokens > 1 && (await made.finishReason));
  },
  async completions() {
    const made = await generateText({ ...short, model: provider.completionModel(model) });
    expect(made.text, made.text);
  },
  async "JSON schema"() {
    expectCity((await generateText({ ...long, output: Output.object({ schema: jsonSchema(citySchema) }) })).output);
    const made = streamText({ ...long, output: Output.object({ schema: jsonSchema(citySchema) }) });
    for await (const part of made.partialOutputStream) expect(typeof part === "object");
    expectCity(await made.output);
  },
  async "tools, required"() {
    expectCity((await generateText(oneCall)).toolCalls[0].input);
  },
  async "tools, streamed"() {
    const made = streamText(oneCall);
    await made.consumeStream();
    expectCity((await made.toolCalls)[0].input);
  },
  async "tools, history"() {
    const first = await generateText(oneCall);
    const call = first.toolCalls[0];
    const result = { toolCallId: call.toolCallId, toolName: "note_city", output: { type: "text", value: "noted" } };
    const messages = [
      { role: "user", content: question },
      { role: "assistant", content: [{ type: "tool-call", ...call }] },
      { role: "tool", content: [{ type: "tool-result", ...result }] },
    ];
    const { prompt, ...fields } = short;
    expect((await generateText({ ...fields, messages, tools: { note_city: noteCity }, toolChoice: "none" })).text);
  },
  async embeddings() {
    const made = await embedMany({ model: provider.embeddingModel(model), values: ["one", "two"] });
    expect(made.embeddings.length === 2 && made.embeddings[0].length > 8);
  },
  async "refused by name"() {
    const error = await generateText({ ...short, temperature: -1 }).catch((thrown) => thrown);
    expect(error.statusCode === 400 && error.message.includes("temperature"), String(error));
  },
});
