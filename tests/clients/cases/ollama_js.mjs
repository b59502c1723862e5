// Ollama's client for JavaScript; prints a line for each feature, as `harness.py` does.

import { Ollama } from "ollama";

const host = process.env.CLIENTS_URL ?? "http://127.0.0.1:8000";
const model = process.env.CLIENTS_MODEL ?? "smollm2-135m";
const client = new Ollama({ host, headers: { authorization: "Bearer no-key-is-needed" } });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { temperature: 0, num_predict: 16 };

function expect(condition, message = "") {
  if (!condition) throw new Error(typeof message === "string" ? message : JSON.stringify(message));
}

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

let failed = false;
for (const [feature, check] of Object.entries(features)) {
  try {
    await check();
    console.log(JSON.stringify({ feature, ok: true, detail: "" }));
  } catch (error) {
    failed = true;
    console.error(error);
    console.log(JSON.stringify({ feature, ok: false, detail: String(error).slice(0, 500) }));
  }
}
process.exit(failed ? 1 : 0);
