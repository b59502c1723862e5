// The page: reads snapshots of the server (`serve/dashboard/feed.py`) as they arrive and shows them. Names chosen by others, such
// as ids of requests, reach the page only by textContent.

import { Histogram, TimeChart, html, quantile, seconds, svg } from "./charts.js";

const KEY = "apt-jax-key", THEME = "apt-jax-theme";
const HISTORY_S = 300, LONG_HISTORY_S = 3600; // for all points, and for points with distributions
const SUMS_S = 10;
const DISTRIBUTIONS = {
  ttft: ["Time to first token", "vllm:time_to_first_token_seconds"],
  tbt: ["Time between tokens", "vllm:inter_token_latency_seconds"],
  e2e: ["Whole request", "vllm:e2e_request_latency_seconds"],
  queue: ["Queue", "vllm:request_queue_time_seconds"],
};
const SILENCE_MS = 12000; // a server that sends nothing for this long counts as lost; it normally sends every second
const RETRY_MS = [1000, 2000, 4000, 8000, 10000];
const STATES = {
  connecting: "Connecting",
  starting: "Starting: the model is being loaded",
  serving: "Serving",
  draining: "Draining: open requests finish, new requests are rejected",
  stalled: "The engine does not answer",
  ended: "The engine has stopped",
  stopped: "The server has stopped",
  lost: "Connection lost",
};

const $ = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");

const charts = {
  blocks: new TimeChart($("blocks"), "Blocks of the pool by kind", [
    { key: "kv", label: "KV", color: "kv" },
    { key: "hidden", label: "Hidden", color: "hidden" },
    { key: "cached", label: "Cached", color: "cached" },
    { key: "free", label: "Free", color: "free" },
  ], { stacked: true }),
  queues: new TimeChart($("queues"), "Requests", [
    { key: "running", label: "Running", color: "work" },
    { key: "waiting", label: "Waiting", color: "queue", dashed: true },
  ]),
  tokens: new TimeChart($("tokens"), "Tokens per second", [
    { key: "output", label: "Output", color: "work" },
    { key: "prompt", label: "Prompt", color: "queue", dashed: true },
  ]),
  percentiles: new TimeChart($("percentiles"), "Percentiles over time", [
    { key: "p50", label: "p50", color: "kv" },
    { key: "p90", label: "p90", color: "hidden" },
    { key: "p99", label: "p99", color: "queue", dashed: true },
  ], { most: 0.001, gapS: 200 }),
  ttft: new Histogram($("ttft"), "Time to first token"),
  tbt: new Histogram($("tbt"), "Time between tokens"),
};

let points = []; // of the last hour: all points of the last five minutes, and earlier points with distributions
let server = null; // id of the server that sent them
let snapshot = null; // the last snapshot with numbers
let paused = false;

// --- connection ---------------------------------------------------------------------------------------------------------------

function stored(storage, key) {
  try { return storage.getItem(key); } catch { return null; } // storage may be forbidden
}

function store(storage, key, value) {
  try { value === null ? storage.removeItem(key) : storage.setItem(key, value); } catch { /* it lasts as long as the page */ }
}

let apiKey = stored(sessionStorage, KEY);

function ask(path, options = {}) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  return fetch(path, { headers, cache: "no-store", ...options });
}

// Server-sent events from a stream of bytes: [name, value].
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

// Reads one connection until it ends; returns the reason.
async function watch() {
  const controller = new AbortController();
  let timer = setTimeout(() => controller.abort(), SILENCE_MS);
  let why = "lost";
  try {
    const response = await ask("dashboard/events", { signal: controller.signal });
    if (response.status === 401) return "key";
    if (!response.ok) return response.status === 429 ? "full" : "lost";
    for await (const [name, value] of eventsOf(response.body)) {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), SILENCE_MS);
      if (name === "history") points = value;
      else {
        take(value);
        why = value.state;
      }
    }
  } catch { /* lost */ } finally {
    clearTimeout(timer);
    controller.abort();
  }
  return ["ended", "stopped"].includes(why) ? why : "lost";
}

async function stayConnected() {
  for (let failures = 0; ;) {
    const before = snapshot;
    const why = await watch();
    document.body.dataset.live = "false";
    if (why === "key") {
      await askForKey();
      failures = 0;
      continue;
    }
    failures = snapshot === before ? failures + 1 : 0;
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    showState(why === "full" ? "lost" : why);
    for (let left = wait; left > 0; left -= 1000) {
      const reason = why === "full" ? "Too many dashboards are open on this server" : STATES[why];
      showBanner(`${reason}. Trying again in ${Math.ceil(left / 1000)} s.`);
      await new Promise((resolve) => setTimeout(resolve, Math.min(left, 1000)));
    }
  }
}

function askForKey() {
  const note = apiKey ? "That key is not accepted. Try another key." : "It is kept in this tab until you close the tab.";
  apiKey = null;
  store(sessionStorage, KEY, null);
  showState("connecting");
  $("key-note").textContent = note;
  $("forget").hidden = true;
  $("key").showModal();
  return new Promise((resolve) => {
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey = $("key-input").value.trim();
      store(sessionStorage, KEY, apiKey);
      $("key-input").value = "";
      $("key").close();
      $("forget").hidden = false;
      resolve();
    }, { once: true });
  });
}

function showState(state) {
  $("state").dataset.state = state;
  if ($("state-text").textContent !== STATES[state]) $("state-text").textContent = STATES[state];
}

function showBanner(text) {
  $("banner").hidden = !text;
  if ($("banner").textContent !== text) $("banner").textContent = text;
}

// --- snapshots ----------------------------------------------------------------------------------------------------------------

function take(next) {
  if (next.server !== server) {
    if (server !== null) points = [];
    server = next.server;
  }
  showState(next.state);
  showBanner(next.state === "serving" || next.state === "connecting" ? "" : next.start ? `Starting: ${next.start}.` : `${STATES[next.state]}.`);
  document.body.dataset.live = String(next.state !== "stalled" && next.metrics !== undefined);
  if (!next.metrics) return;
  snapshot = next;
  if (!points.length || points.at(-1).at_s < next.point.at_s) points.push(next.point);
  const last = points.findLast((point) => point.sums);
  if (!last || next.point.at_s - last.at_s >= SUMS_S) points.at(-1).sums = sumsNow();
  points = points.filter((point) => point.at_s > next.at_s - (point.sums ? LONG_HISTORY_S : HISTORY_S));
  if (!paused) show();
}

// A metric of the snapshot: the sum over these labels, or over all.
function metric(name, labels = null) {
  const values = snapshot.metrics[name] ?? {};
  return (labels ?? Object.keys(values)).reduce((sum, label) => sum + (values[label] ?? 0), 0);
}

function show() {
  $("model").textContent = snapshot.model;
  document.title = `${snapshot.model} · apt-jax dashboard`;
  for (const node of document.querySelectorAll("[data-metric]")) {
    const labels = node.dataset.labels ? node.dataset.labels.split(" ") : null;
    node.textContent = count(metric(node.dataset.metric, labels));
  }
  showTiles();
  const shown = windowS === null ? points : points.filter((point) => point.at_s > snapshot.at_s - windowS);
  charts.blocks.draw(shown);
  charts.queues.draw(shown);
  charts.tokens.draw(rates(shown));
  showLatencies();
  showObjectives();
  showClasses();
  showTiers();
  showTables();
  refreshRequest();
}

// --- distributions in the chosen window ----------------------------------------------------------------------------------------

let windowS = HISTORY_S; // null: since the start

const boundsOf = (name) => Object.keys(snapshot.metrics[`${DISTRIBUTIONS[name][1]}_bucket`] ?? {}).map((bound) => (bound === "+Inf" ? Infinity : Number(bound)));

// Distributions of the last snapshot, in the form that points of the history have.
function sumsNow() {
  const sums = { finished: snapshot.metrics["vllm:request_success_total"] ?? {} };
  for (const [name, [, metric]] of Object.entries(DISTRIBUTIONS)) sums[name] = Object.values(snapshot.metrics[`${metric}_bucket`] ?? {});
  return sums;
}

// The sums at the start of the window; null: the window contains all values.
function sumsBefore() {
  return windowS === null ? null : points.findLast((point) => point.sums && point.at_s <= snapshot.at_s - windowS)?.sums ?? null;
}

const between = (name, before, after) => boundsOf(name).map((bound, i) => [bound, (after[name][i] ?? 0) - (before?.[name][i] ?? 0)]);

function showLatencies() {
  const before = sumsBefore(), now = sumsNow();
  $("latency").tBodies[0].replaceChildren(...Object.entries(DISTRIBUTIONS).map(([name, [label]]) => {
    const buckets = between(name, before, now);
    const shown = [0.5, 0.9, 0.99].map((share) => quantile(buckets, share)).map((value) => (
      value === null ? "–" : value < buckets[0][0] ? `< ${seconds(buckets[0][0])}` : seconds(+value.toPrecision(2)))); // nothing is known within the first bucket
    return numbersRow(label, name, [count(buckets.at(-1)?.[1] ?? 0), ...shown]);
  }));
  const ended = Object.entries(now.finished).map(([why, n]) => [why, n - (before?.finished[why] ?? 0)]).filter(([, n]) => n);
  $("finished").textContent = `Requests ended by: ${ended.map(([why, n]) => `${why} ${count(n)}`).join(", ") || "none yet"}.`;
  for (const name of ["ttft", "tbt"]) {
    const sum = `${DISTRIBUTIONS[name][1]}_sum`;
    charts[name].draw(between(name, before, now), before ? null : metric(sum));
  }
  showPercentiles(now);
}

// Draws the quantiles of the values between points that are a sixtieth of the window apart.
function showPercentiles(now) {
  const name = $("percentiles-of").value, spanS = Math.max(SUMS_S, (windowS ?? LONG_HISTORY_S) / 60);
  const from = windowS === null ? -Infinity : snapshot.at_s - windowS, drawn = [];
  let last = null;
  for (const point of [...points.filter((one) => one.sums), { at_s: snapshot.at_s, sums: now }]) {
    if (last && point.at_s - last.at_s < spanS * 0.9) continue;
    if (last && point.at_s > from) {
      const buckets = between(name, last.sums, point.sums);
      const [p50, p90, p99] = [0.5, 0.9, 0.99].map((share) => quantile(buckets, share));
      if (p50 !== null) drawn.push({ at_s: point.at_s, p50, p90, p99 });
    }
    last = point;
  }
  charts.percentiles.draw(drawn);
}

$("window").addEventListener("change", () => {
  windowS = $("window").value ? Number($("window").value) : null;
  if (snapshot) show();
});
$("percentiles-of").addEventListener("change", () => { if (snapshot) show(); });

// Tokens per second between each point and the previous point.
function rates(shown) {
  return shown.slice(1).map((point, i) => {
    const before = shown[i], s = Math.max(0.001, point.at_s - before.at_s);
    return {
      at_s: point.at_s,
      output: Math.max(0, point.generation_tokens - before.generation_tokens) / s,
      prompt: Math.max(0, point.prompt_tokens - before.prompt_tokens) / s,
    };
  });
}

function showTiles() {
  const now = points.at(-1), then = points.find((point) => point.at_s > now.at_s - 5.5);
  const s = now.at_s - then.at_s;
  $("output-rate").textContent = s ? count((now.generation_tokens - then.generation_tokens) / s) : "–";
  $("note-output").textContent = `prompts ${count(metric("vllm:prompt_tokens_total"))}`;
  $("pool").textContent = `${(100 * metric("vllm:kv_cache_usage_perc")).toFixed(0)} %`;
  const queries = metric("vllm:prefix_cache_queries_total"), hits = metric("vllm:prefix_cache_hits_total");
  $("note-pool").textContent = queries ? `prefix hits ${((100 * hits) / queries).toFixed(0)} %` : `of ${count(metric("aptjax:blocks"))} blocks`;
  const host = metric("aptjax:host_blocks"); // 0: there is no host memory
  if (host) $("note-pool").textContent += `, host ${((100 * metric("aptjax:host_blocks", ["used"])) / host).toFixed(0)} %`;
  const others = { aborted: metric("vllm:request_success_total", ["abort"]), failed: metric("vllm:request_success_total", ["error"]), refused: metric("aptjax:requests_refused_total") };
  const some = Object.entries(others).filter(([, n]) => n).map(([name, n]) => `${count(n)} ${name}`);
  $("note-completed").textContent = $("note-completed").title = some.join(", ") || "requests";
  $("note-preemptions").textContent = `${count(metric("aptjax:recomputed_tokens_total"))} recomputed`;
  $("note-switches").textContent = `to hidden ${count(metric("aptjax:cache_kind_switch_total", ["kv,hidden"]))}, KV ${count(metric("aptjax:cache_kind_switch_total", ["hidden,kv"]))}`;
}

const CLASSES = [["rt", "Real time"], ["be", "Best effort"]];

function numbersRow(label, key, texts) {
  const row = html("tr"), head = html("th", "", label);
  head.scope = "row";
  row.dataset.row = key;
  row.append(head, ...texts.map((text) => html("td", "n", text)));
  return row;
}

function showClasses() {
  const mean = (name, of) => {
    const n = metric(`aptjax:class_${name}_seconds_count`, [of]);
    return n ? seconds(metric(`aptjax:class_${name}_seconds_sum`, [of]) / n) : "–";
  };
  $("classes").tBodies[0].replaceChildren(...CLASSES.map(([of, label]) => numbersRow(label, of, [
    count(metric("aptjax:class_requests", [`${of},running`])),
    count(metric("aptjax:class_requests", [`${of},waiting`])),
    count(metric("aptjax:class_generation_tokens_total", [of])),
    ...["queue_time", "time_to_first_token", "inter_token_latency"].map((name) => mean(name, of)),
  ])));
}

const SESSION_STATES = { running: "running", device: "idle on the device", host: "idle in host memory", uncached: "without cache" };

function showTiers() {
  const found = (tier) => count(metric("aptjax:cache_hit_tokens_total", [tier]));
  const prompts = metric("aptjax:prompt_tokens_by_source_total");
  const share = (source) => (prompts ? `${((100 * metric("aptjax:prompt_tokens_by_source_total", [source])) / prompts).toFixed(1)} %` : "–");
  const rows = [numbersRow("Device", "device", [count(metric("aptjax:blocks", ["kv", "hidden"])), count(metric("aptjax:blocks")), found("device"), share("device")])];
  const host = metric("aptjax:host_blocks"); // 0: there is no host memory
  if (host) rows.push(numbersRow("Host memory", "host", [count(metric("aptjax:host_blocks", ["used"])), count(host), found("host"), share("host")]));
  for (const [source, label] of [["disk", "Disk"], ["evicted", "Computed again, evicted"], ["new", "Computed, new"]]) {
    if (source in (snapshot.metrics["aptjax:prompt_tokens_by_source_total"] ?? {})) rows.push(numbersRow(label, source, ["–", "–", "–", share(source)]));
  }
  $("tiers").tBodies[0].replaceChildren(...rows);
  const moved = (way) => `${count(metric("aptjax:host_moved_blocks_total", [way]))} blocks and ${count(metric("aptjax:host_moved_slots_total", [way]))} slots`;
  const ways = Object.entries(snapshot.metrics["aptjax:restores_total"] ?? {}).filter(([, n]) => n).map(([way, n]) => `${count(n)} ${way}`);
  $("tiers-note").textContent = host
    ? `Saved ${moved("save")}, loaded ${moved("load")}. Requests restored: ${ways.join(", ") || "none"}. ${count(metric("aptjax:host_lost_groups_total"))} groups lost.`
    : "There is no host memory (--swap-space).";
  const sessions = Object.entries(snapshot.metrics["aptjax:sessions"] ?? {}).map(([state, n]) => `${count(n)} ${SESSION_STATES[state]}`);
  if (sessions.length) $("tiers-note").textContent += ` Sessions: ${sessions.join(", ")}.`;
}

function showObjectives() {
  const rows = CLASSES.map(([name, label]) => {
    const row = html("tr"), head = html("th", "", label);
    head.scope = "row";
    row.append(head);
    for (const objective of ["ttft", "tbt", "e2e", "all", "strict"]) {
      const attained = metric("aptjax:slo_attained_total", [`${objective},${name}`]);
      const all = attained + metric("aptjax:slo_missed_total", [`${objective},${name}`]);
      const cell = html("td");
      cell.dataset.slo = `${objective},${name}`;
      cell.append(html("span", "share", all ? `${floored((100 * attained) / all)} %` : "–"));
      if (all) {
        const bar = html("progress");
        bar.max = all;
        bar.value = attained;
        bar.setAttribute("aria-hidden", "true"); // the numbers beside it show the same
        cell.append(bar);
      }
      cell.append(html("span", "note", all ? `${count(attained)} of ${count(all)}` : "no requests"));
      row.append(cell);
    }
    return row;
  });
  $("slo").tBodies[0].replaceChildren(...rows);
}

// 99.96 is not yet 100.
const floored = (share) => (Math.floor(share * 10) / 10).toFixed(share === 100 ? 0 : 1);

// --- tables -------------------------------------------------------------------------------------------------------------------

function idCell(requestId) {
  const cell = html("td", "id", requestId === null ? "of another key" : "");
  if (requestId === null) cell.classList.add("empty");
  else {
    const button = html("button", "", requestId);
    button.type = "button";
    button.title = requestId;
    button.dataset.request = requestId;
    cell.append(button);
  }
  return cell;
}

const kindName = (kind) => (kind === "kv" ? "KV" : kind);

function kindCell(kind) {
  if (kind === null) return html("td", "empty", "–");
  const cell = html("td");
  const mark = html("span", `kind ${kind}`);
  mark.append(html("span", "", kindName(kind)));
  cell.append(mark);
  return cell;
}

// Existing rows keep their elements, so that focus and selection survive.
function fill(table, rows, keyOf, cellsOf, empty) {
  const body = table.tBodies[0], focused = document.activeElement?.closest("tr")?.dataset.key;
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = rows.map((row, i) => {
    const key = keyOf(row, i), text = JSON.stringify(row);
    const node = old.get(key) ?? html("tr");
    old.delete(key);
    if (node.dataset.shown !== text) {
      const cells = cellsOf(row);
      if (node.cells.length) [...node.cells].slice(1).forEach((cell, j) => cell.replaceWith(cells[j + 1]));
      else node.append(...cells);
      node.dataset.key = key;
      node.dataset.shown = text;
    }
    return node;
  });
  for (const node of old.values()) node.remove();
  wanted.forEach((node, i) => { if (body.rows[i] !== node) body.insertBefore(node, body.rows[i] ?? null); });
  if (!rows.length) {
    const row = body.insertRow(), cell = html("td", "empty", empty);
    cell.colSpan = table.tHead.rows[0].cells.length;
    row.append(cell);
  }
  const again = focused && wanted.find((node) => node.dataset.key === focused);
  if (again && !again.contains(document.activeElement)) again.querySelector("button")?.focus();
}

function showTables() {
  const { iteration, batch, changes, requests, at_s: nowS } = snapshot;
  const idle = !iteration || !metric("vllm:num_requests_running");
  $("iteration").textContent = !iteration
    ? "No step has been seen yet."
    : `${idle ? "Idle. Last step: " : "Step "}${count(iteration.number)}, ${iteration.type}, ${iteration.rows === 1 ? "1 request" : `${iteration.rows} requests`}, ${iteration.step_ms === null ? "–" : seconds(iteration.step_ms / 1e3)}, decided in ${seconds(iteration.schedule_ms / 1e3)}`;
  fill($("batch"), idle ? [] : batch, (row, i) => row.request_id ?? `other ${i}`, (row) => [
    idCell(row.request_id), html("td", "", row.phase), kindCell(row.kind), html("td", "n", count(row.tokens)), html("td", "n", count(row.cached)),
  ], "No request is running.");
  fill($("requests"), requests, (row) => `${row.request_id} ${row.arrival_s}`, (row) => [
    idCell(row.request_id),
    html("td", "", row.state),
    kindCell(row.kind),
    html("td", "n", count(row.prompt_tokens)),
    html("td", "n", count(row.preemptions)),
    html("td", "n", row.ended_ms === null ? "–" : seconds(row.ended_ms / 1e3)),
  ], "None yet.");
  const aged = changes.map((row) => ({ ...row, ago: Math.max(0, Math.round(nowS - row.at_s)) }));
  fill($("changes"), aged, (row, i) => `${row.at_s} ${row.event} ${row.request_id ?? `other ${i}`}`, (row) => [
    idCell(row.request_id),
    html("td", "", row.event === "preempted" ? `lost ${count(row.tokens)} token${row.tokens === 1 ? "" : "s"} (${kindName(row.kind)})` : `${kindName(row.old)} → ${kindName(row.new)}`),
    html("td", "n", `${row.ago} s`),
  ], "None.");
}

// --- one request --------------------------------------------------------------------------------------------------------------

let shownRequest = null; // { id, over, asking }

function openRequest(id) {
  shownRequest = { id, over: false, asking: false };
  $("request-id").textContent = id;
  $("request-note").textContent = "Asking the server.";
  $("request-strip").replaceChildren();
  $("decisions").tBodies[0].replaceChildren();
  if (!$("request").open) $("request").showModal();
  refreshRequest();
}

async function refreshRequest() {
  const request = shownRequest;
  if (!request || request.over || request.asking) return;
  request.asking = true;
  try {
    const response = await ask(`v1/requests/${encodeURIComponent(request.id)}/decisions`);
    const body = await response.json();
    if (request !== shownRequest) return;
    if (response.ok) showDecisions(body);
    else $("request-note").textContent = body.error.message;
    request.over = !response.ok || body.events.at(-1)?.event === "ended";
  } catch {
    if (request === shownRequest) $("request-note").textContent = "The server does not answer.";
  } finally {
    request.asking = false;
  }
}

function showDecisions(log) {
  const last = log.events.at(-1);
  $("decisions").hidden = $("request-strip").hidden = !last;
  $("request-note").textContent = !last
    ? "It is waiting; nothing has been decided yet."
    : `${last.event === "ended" ? `Ended (${last.reason}) after` : "So far"} ${seconds(last.until_ms / 1e3)}${log.num_dropped ? `; ${log.num_dropped} events were dropped` : ""}.`;
  const end = Math.max(1e-3, ...log.events.map((event) => event.until_ms));
  const strip = svg("svg", { viewBox: "0 0 1000 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const { event, at_ms: from, until_ms: until } of log.events) {
    const width = Math.max(2, (1000 * (until - from)) / end);
    strip.append(svg("rect", { class: `bar ${event}`, x: Math.min(998, (1000 * from) / end), y: until > from ? 5 : 0, width, height: until > from ? 20 : 30 }));
  }
  $("request-strip").replaceChildren(strip);
  $("decisions").tBodies[0].replaceChildren(...log.events.map(({ event, at_ms: from, until_ms: until, ...details }) => {
    const row = html("tr"), name = html("td"), mark = html("span", `kind ${event}`);
    mark.append(html("span", "", event));
    name.append(mark);
    const text = Object.entries(details).map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`).join(", ");
    row.append(name, html("td", "n", seconds(from / 1e3)), html("td", "n", until > from ? seconds(until / 1e3) : ""), html("td", "", text));
    return row;
  }));
}

// --- controls -----------------------------------------------------------------------------------------------------------------

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  $("theme").textContent = `Theme: ${theme}`;
}

document.addEventListener("click", (event) => {
  const id = event.target.closest("button[data-request]")?.dataset.request;
  if (id !== undefined) openRequest(id);
});
$("request-close").addEventListener("click", () => $("request").close());
$("request").addEventListener("close", () => { shownRequest = null; });
$("request").addEventListener("click", (event) => { if (event.target === $("request")) $("request").close(); });
$("key").addEventListener("cancel", (event) => event.preventDefault()); // a key is required
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Resume" : "Pause";
  if (!paused && snapshot) show();
});
$("theme").addEventListener("click", () => {
  const order = [undefined, "light", "dark"], root = document.documentElement;
  const next = order[(order.indexOf(root.dataset.theme) + 1) % 3];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  store(localStorage, THEME, next ?? null);
  showTheme();
});
$("forget").addEventListener("click", () => {
  store(sessionStorage, KEY, null);
  location.reload();
});

const theme = stored(localStorage, THEME);
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
showTheme();
$("forget").hidden = !apiKey;
stayConnected();
