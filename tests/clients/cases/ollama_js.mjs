// Ollama's client for JavaScript.

import { expect, messages, model, rootUrl, run } from "./harness.mjs";
import { Ollama } from "ollama";

const client = new Ollama({ host: rootUrl, headers: { authorization: "Bearer no-key-is-needed" } });
const options = { temperature: 0, num_predict: 16 };

const features = {
  async models() {
    expect((await client.list()).models.some((found) => found.model === model));
    expect((await client.show({ model })).capabilities.includes("completion"));
  },
  async chat() {
    const made = await client.chat({ model, messages, options });
    expect(made.message.content && made.done && made.eval_count > 1, made);
  },
  async streams() {
    const whole = await client.chat({ model, messages, options });
    let text = "", last = null;
    for await (const piece of await client.chat({ model, messages, options, stream: true })) {
      text += piece.message.content;
      last = piece;
    }
    expect(text === whole.message.content && last.done, text);
  },
  async completions() {
    const made = await client.generate({ model, prompt: "The capital of France is", raw: true, options });
    expect(made.response, made);
  },
  async "JSON schema"() {
    const format = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
    const made = await client.chat({ model, messages, format, options: { temperature: 0, num_predict: 60 } });
    expect(JSON.parse(made.message.content).city, made);
  },
  async embeddings() {
    const made = await client.embed({ model, input: ["One text.", "Another one."] });
    expect(made.embeddings.length === 2 && made.embeddings[0].length > 8);
  },
  async "refused by name"() {
    const wrong = client.chat({ model, messages, options: { temperature: -1 } });
    const error = await wrong.then(() => null, (thrown) => thrown);
    expect(error && error.message.includes("options.temperature"), String(error));
  },
};

await run(features);
