// A chat with the models of this server, by the API that other clients use (`POST /v1/chat/completions`). What models and servers
// say reaches the page by textContent alone. The API key is kept in memory, and the conversation as well.

import { html } from "../dashboard/charts.js";
import { Timeline } from "./timeline.js";

const THEME = "apt-jax-theme"; // shared with the dashboard
const RETRY_MS = 1500;
const $ = (id) => document.getElementById(id);

let apiKey = null;
let messages = []; // of this conversation, without the system prompt
let answering = null; // the AbortController of the answer that is being written
let usable = false; // the chosen model has a chat template

// --- the server ----------------------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Calls the server; asks for a key, and again, until it takes one.
async function call(path, body, signal) {
  for (;;) {
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    if (apiKey) headers.authorization = `Bearer ${apiKey}`;
    const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    const response = await fetch(path, { headers, cache: "no-store", signal, ...sent });
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    throw new Refused(response.status, await messageOf(response));
  }
}

async function messageOf(response) {
  try { return (await response.json()).error.message; } catch { return `the server answers with ${response.status}`; }
}

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    $("key-note").textContent = apiKey ? "That key is not accepted. Try another one." : "It is kept in this page alone, until the page is left.";
    apiKey = null;
    $("key").showModal();
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey = $("key-input").value.trim();
      $("key-input").value = "";
      $("key").close();
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

// The values of server-sent events, until `[DONE]`.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the server ended the answer early");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- models --------------------------------------------------------------------------------------------------------------------

async function listModels() {
  for (;;) {
    try {
      const models = (await (await call("v1/models")).json()).data;
      $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
      $("model").disabled = false;
      await chooseModel();
      return;
    } catch (error) {
      show("connecting", error.status === 503 ? "The server is loading its model." : "The server does not answer. Trying again.");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

// Has the server render one message, so that a model that cannot chat is told apart before anything is asked.
async function chooseModel() {
  const model = $("model").value;
  document.title = `${model} · apt-jax chat`;
  usable = true;
  show("ready", "");
  try {
    await call("tokenize", { model, messages: [{ role: "user", content: "Hi" }] });
  } catch (error) {
    if (model !== $("model").value) return;
    if (error.status !== 400 || !/chat template|tokenizer/.test(error.message)) return;
    usable = false;
    show("no-template", `${model} cannot chat: it has no chat template. Serve a model that has one (apt-jax serve smollm2-135m), or give it one (--chat-template FILE).`);
  }
}

function show(state, text) {
  document.body.dataset.state = state;
  $("banner").hidden = !text;
  $("banner").textContent = text;
  $("send").disabled = !usable || answering !== null;
}

// --- questions and answers -----------------------------------------------------------------------------------------------------

const numberOf = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function bodyOf(question) {
  const system = $("system").value.trim();
  const slo = { ttft_ms: numberOf("ttft"), tbt_ms: numberOf("tbt") };
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: question }],
    temperature: numberOf("temperature"),
    max_completion_tokens: numberOf("max-tokens"),
    slo,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    aptjax_timings: true,
  };
}

function addTurn(role, text) {
  const turn = html("article", `turn ${role}`), body = html("div", "text", text);
  turn.append(html("div", "who", role === "user" ? "You" : $("model").value), body);
  $("hello")?.remove();
  $("log").append(turn);
  return { turn, body };
}

// Keeps the end in sight, unless the reader has gone up.
function following(change) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function answer(question) {
  const conversation = messages; // "New chat" begins another one meanwhile
  const body = bodyOf(question), controller = answering = new AbortController();
  const asked = addTurn("user", question), { turn, body: text } = addTurn("assistant", "");
  const timeline = new Timeline(body.slo);
  turn.setAttribute("aria-busy", "true");
  turn.append(timeline.node);
  $("log").scrollTop = $("log").scrollHeight;
  $("stop").hidden = false;
  $("send").hidden = true;
  show("answering", "");
  let id = null, tokens = 0, written = "", problem = null;
  const frames = setInterval(() => following(() => timeline.draw()), 100);
  try {
    const response = await call("v1/chat/completions", body, controller.signal);
    for await (const event of eventsOf(response.body)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      const now = event.usage?.completion_tokens ?? tokens, choice = event.choices[0];
      if (now > tokens) timeline.tokens(now - tokens);
      tokens = now;
      if (!choice) continue;
      if (choice.delta.content) {
        written += choice.delta.content;
        following(() => { text.textContent = written; });
      }
      if (choice.finish_reason) timeline.finish(choice.finish_reason, choice.aptjax);
    }
  } catch (error) {
    problem = error;
  }
  clearInterval(frames);
  if (controller.signal.aborted) timeline.finish("stopped");
  else if (problem) {
    timeline.finish("failed");
    turn.append(html("p", "problem", problem instanceof TypeError ? "The server does not answer." : problem.message));
  }
  answering = null;
  turn.setAttribute("aria-busy", "false");
  $("stop").hidden = true;
  $("send").hidden = false;
  show(document.body.dataset.state === "answering" ? "ready" : document.body.dataset.state, "");
  if (id === null && problem) { // nothing of it was answered: the question can be asked again
    asked.turn.classList.add("unanswered");
    if (!$("question").value) $("question").value = question;
    if (!tokens) timeline.node.remove();
  } else conversation.push({ role: "user", content: question }, { role: "assistant", content: written });
  following(() => timeline.draw());
  if (id !== null) await explain(id, timeline);
}

// What the scheduler did to the request, if the server keeps that.
async function explain(id, timeline) {
  try {
    const { events } = await (await call(`v1/requests/${encodeURIComponent(id)}/decisions`)).json();
    following(() => timeline.explain(events));
  } catch { /* it keeps no decisions, or no longer this one's */ }
}

// --- controls ------------------------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || $("send").disabled) return;
  if (!$("settings").checkValidity()) {
    openSettings(true);
    $("settings").reportValidity();
    return;
  }
  $("question").value = "";
  answer(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => answering?.abort());
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("model").addEventListener("change", chooseModel);
$("key").addEventListener("cancel", (event) => event.preventDefault()); // there is nothing to ask without one
$("reset").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  $("log").replaceChildren();
  $("question").focus();
});

function openSettings(open) {
  $("settings").hidden = !open;
  $("options").setAttribute("aria-expanded", String(open));
}
$("options").addEventListener("click", () => openSettings($("settings").hidden));

function stored() {
  try { return localStorage.getItem(THEME); } catch { return null; } // storage may be forbidden
}

function showTheme(theme) {
  const root = document.documentElement;
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  else delete root.dataset.theme;
  $("theme").textContent = `Theme: ${root.dataset.theme ?? "system"}`;
}
$("theme").addEventListener("click", () => {
  const order = [undefined, "light", "dark"];
  const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3];
  try { next ? localStorage.setItem(THEME, next) : localStorage.removeItem(THEME); } catch { /* it lasts as long as the page */ }
  showTheme(next);
});

showTheme(stored());
if (matchMedia("(max-width: 640px)").matches) openSettings(false);
listModels();
