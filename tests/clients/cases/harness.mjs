// Parts that the scripts in JavaScript share: what harness.py is for those in Python.

export const rootUrl = process.env.CLIENTS_URL ?? "http://127.0.0.1:8000";
export const baseURL = `${rootUrl}/v1`;
export const model = process.env.CLIENTS_MODEL ?? "smollm2-135m";
export const apiKey = "no-key-is-needed";
export const question = "What is the capital of France?";
export const messages = [{ role: "user", content: question }];
export const citySchema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 30 }, people: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["city", "people"],
  additionalProperties: false,
};

export function expect(condition, message = "") {
  if (!condition) throw new Error(typeof message === "string" ? message : JSON.stringify(message));
}

/** Run all features and print a line for each. */
export async function run(features) {
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
}
