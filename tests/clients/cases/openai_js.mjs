// OpenAI's SDK for JavaScript.

import { apiKey, baseURL, citySchema, expect, messages, model, question, run } from "./harness.mjs";
import OpenAI from "openai";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const short = { model, messages, max_tokens: 12, temperature: 0 };
const tool = { type: "function", function: { name: "note_city", description: "Note a city", parameters: citySchema } };
const oneCall = { ...short, max_tokens: 80, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
const responseFormat = { type: "json_schema", json_schema: { name: "city", schema: citySchema, strict: true } };

function expectCity(text) {
  expect(Object.keys(JSON.parse(text)).sort().join() === "city,people", text);
}

await run({
  async models() {
    const found = [];
    for await (const one of client.models.list()) found.push(one.id);
    expect(found.includes(model) && (await client.models.retrieve(model)).id === model, found);
  },
  async completions() {
    const made = await client.completions.create({ model, prompt: ["One two", "Three"], n: 2, max_tokens: 4 });
    expect(made.choices.length === 4, made);
  },
  async chat() {
    const made = await client.chat.completions.create(short);
    expect(made.choices[0].message.content && made.usage.completion_tokens <= 12, made);
  },
  async streams() {
    const whole = await client.chat.completions.create(short);
    const stream = client.chat.completions.stream({ ...short, stream_options: { include_usage: true } });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    const final = await stream.finalChatCompletion();
    expect(text === whole.choices[0].message.content && text === final.choices[0].message.content, text);
    expect((await stream.totalUsage()).total_tokens === whole.usage.total_tokens);
  },
  async "streams, left"() {
    const stream = await client.chat.completions.create({ ...short, max_tokens: 400, ignore_eos: true, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break;
    expect(stream.controller.signal.aborted);
    expect((await client.chat.completions.create(short)).choices[0].message.content);
  },
  async "JSON schema"() {
    const made = await client.chat.completions.parse({ ...short, max_tokens: 80, response_format: responseFormat });
    expectCity(made.choices[0].message.content);
  },
  async "tools, required"() {
    const made = await client.chat.completions.create(oneCall);
    expectCity(made.choices[0].message.tool_calls[0].function.arguments);
  },
  async "tools, streamed"() {
    const final = await client.chat.completions.stream(oneCall).finalChatCompletion();
    expectCity(final.choices[0].message.tool_calls[0].function.arguments);
  },
  async embeddings() {
    const made = await client.embeddings.create({ model, input: ["one", "two"] }); // as base64, which it decodes
    const floats = await client.embeddings.create({ model, input: ["one", "two"], encoding_format: "float" });
    expect(made.data.length === 2 && made.data[0].embedding.length === floats.data[0].embedding.length, made);
    made.data[0].embedding.forEach((value, i) => expect(Math.abs(value - floats.data[0].embedding[i]) < 1e-5, i));
  },
  async Responses() {
    const made = await client.responses.create({ model, input: question, temperature: 0, max_output_tokens: 24 });
    expect(made.output_text, made);
  },
  async "Responses, streams"() {
    const fields = { model, input: question, temperature: 0, max_output_tokens: 24 };
    let text = "";
    const stream = client.responses.stream(fields);
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    expect(text && text === (await stream.finalResponse()).output_text, text);
  },
  async "Responses, JSON schema"() {
    const format = { type: "json_schema", name: "city", schema: citySchema, strict: true };
    const made = await client.responses.parse({ model, input: question, max_output_tokens: 80, text: { format } });
    expectCity(made.output_text);
  },
  async "refused by name"() {
    const error = await client.chat.completions.create({ ...short, temperature: -1 }).catch((thrown) => thrown);
    expect(error instanceof OpenAI.BadRequestError && error.message.includes("temperature"), String(error));
    const missing = await client.chat.completions.create({ ...short, model: "another" }).catch((thrown) => thrown);
    expect(missing instanceof OpenAI.NotFoundError && missing.message.includes("another"), String(missing));
  },
});
