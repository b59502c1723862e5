// The timeline of one answer: the wait for the first token, every token at its arrival time, the objectives, and the scheduler's
// decisions about the request.

import { html, seconds, svg } from "../dashboard/charts.js";

const WIDTH = 1000, TOP = 12, BOTTOM = 32;
const MARKS = { preempted: "preempted", converted: "converted to KV", switched: "switched kind", lost: "cache lost" };
const COLORS = { preempted: "queue", lost: "queue", converted: "hidden", switched: "hidden" };
const MOST_TICKS = 2000;

export class Timeline {
  // slo: the requested objectives, milliseconds: ttft_ms, tbt_ms, e2e_ms; undefined: the server's.
  constructor(slo) {
    this.node = html("details", "timeline"); // closed it is one line
    this.node.open = [slo.ttft_ms, slo.tbt_ms, slo.e2e_ms].some((ms) => ms !== undefined);
    this.node.addEventListener("toggle", () => this.draw());
    this.brief = html("summary");
    this.verdict = html("p", "verdict");
    this.legend = html("ul", "legend");
    this.svg = svg("svg", { role: "img" });
    this.node.append(this.brief, this.svg, this.legend, this.verdict);
    this.ttft = slo.ttft_ms ?? null;
    this.tbt = slo.tbt_ms ?? null;
    this.e2e = slo.e2e_ms ?? null;
    this.begun = performance.now();
    this.arrivals = []; // [milliseconds since the question, tokens]
    this.ended = null; // milliseconds since the question
    this.marks = []; // [kind of event, milliseconds since the question]
    this.facts = null; // the server's timings
    this.reason = "";
    this.draw();
    new ResizeObserver(() => this.draw()).observe(this.svg); // its text keeps its size
  }

  now() { return performance.now() - this.begun; }

  tokens(count) { this.arrivals.push([this.now(), count]); }

  finish(reason, facts = null) {
    this.reason = reason;
    this.ended = this.now();
    this.facts = facts;
    if (facts) { // the objectives in force, including the server's defaults
      this.ttft = facts.slo.ttft_ms;
      this.tbt = facts.slo.tbt_ms;
      this.e2e = facts.slo.e2e_ms;
    }
  }

  // events: from `GET /v1/requests/ID/decisions`, with times since the arrival at the server.
  explain(events) {
    const shift = this.facts?.timings.ttft_ms && this.arrivals.length ? Math.max(0, this.arrivals[0][0] - this.facts.timings.ttft_ms) : 0;
    this.marks = events.filter(({ event }) => MARKS[event]).map(({ event, at_ms: at }) => [event, at + shift]);
    this.draw();
  }

  // Tokens per second after the first arrival; null: too few tokens.
  pace(count) {
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    return this.arrivals.length > 1 && last[0] > first[0] ? `${+((1e3 * (count - first[1])) / (last[0] - first[0])).toPrecision(3)}` : null;
  }

  // Times between tokens, milliseconds; tokens that came together count as one arrival.
  gaps() { return this.arrivals.slice(1).map(([at], i) => at - this.arrivals[i][0]); }

  draw() {
    const end = Math.max(this.ended ?? this.now(), this.ttft !== null && this.ttft < 4 * (this.ended ?? this.now()) ? this.ttft * 1.02 : 0, 1);
    const width = Math.max(200, this.svg.clientWidth || WIDTH), x = (ms) => (width * ms) / end;
    const first = this.arrivals[0]?.[0] ?? this.ended ?? this.now();
    const parts = [
      svg("rect", { class: "wait", x: 0, y: TOP, width: x(Math.min(first, end)), height: BOTTOM - TOP }),
      svg("line", { class: "axis", x1: 0, x2: width, y1: BOTTOM, y2: BOTTOM }),
    ];
    let before = null;
    for (const [at] of this.arrivals.slice(-MOST_TICKS)) {
      const late = before === null ? this.ttft !== null && at > this.ttft : this.tbt !== null && at - before > this.tbt;
      parts.push(svg("line", { class: late ? "token late" : "token", x1: x(at), x2: x(at), y1: TOP, y2: BOTTOM }));
      before = at;
    }
    if (this.ttft !== null && this.ttft <= end) parts.push(svg("line", { class: "objective", x1: x(this.ttft), x2: x(this.ttft), y1: TOP - 5, y2: BOTTOM + 3 }));
    for (const [event, at] of this.marks) {
      const cx = Math.min(width - 5, Math.max(5, x(at)));
      const mark = svg("path", { class: `event ${COLORS[event]}`, d: `M${cx - 5} 1h10l-5 9z` });
      mark.append(svg("title", {}, `${MARKS[event]} after ${seconds(at / 1e3)}`));
      parts.push(mark);
    }
    parts.push(svg("text", { x: 0, y: 44 }, "0"), svg("text", { x: width, y: 44, "text-anchor": "end" }, seconds(end / 1e3)));
    this.svg.setAttribute("viewBox", `0 0 ${width} 46`);
    this.svg.replaceChildren(...parts);
    this.tell();
  }

  tell() {
    const gaps = this.gaps(), sorted = [...gaps].sort((a, b) => a - b);
    const at = (share) => sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
    const count = this.arrivals.reduce((sum, [, n]) => sum + n, 0);
    const spoken = [];
    const say = (name, value, objective, attained) => {
      const item = html("span");
      item.append(`${name} `, html("b", "", value));
      if (objective !== null) item.append(` of ${seconds(objective / 1e3)} `, html("b", attained ? "met" : "missed", attained ? "met" : "missed"));
      spoken.push(item);
    };
    const slo = this.facts?.slo;
    if (this.arrivals.length) {
      const [[first]] = this.arrivals;
      say("TTFT", seconds(first / 1e3), this.ttft, slo?.ttft_attained ?? first <= this.ttft);
    } else say(this.ended === null ? "waiting" : "waited", seconds((this.ended ?? this.now()) / 1e3), null);
    if (gaps.length) {
      say("TBT median", seconds(at(0.5) / 1e3), null);
      say("P99", seconds(at(0.99) / 1e3), this.tbt, slo?.tbt_attained ?? at(0.99) <= this.tbt);
      say("longest", seconds(sorted.at(-1) / 1e3), null);
    }
    if (this.e2e !== null && this.ended !== null && this.arrivals.length) {
      const [last] = this.arrivals.at(-1);
      say("last token", seconds(last / 1e3), this.e2e, slo?.e2e_attained ?? last <= this.e2e);
    }
    const pace = this.pace(count);
    say("tokens", `${count}`, null);
    if (pace) say("tokens/s", pace, null);
    this.brief.textContent = [
      this.arrivals.length ? `first token after ${seconds(this.arrivals[0][0] / 1e3)}` : `${this.ended === null ? "waiting" : "waited"} ${seconds((this.ended ?? this.now()) / 1e3)}`,
      ...(pace ? [`${pace} tokens/s`] : []), ...(count ? [count === 1 ? "1 token" : `${count} tokens`] : []),
      ...(slo && slo.attained === false ? ["objective missed"] : []),
    ].join(", ");
    const rest = [];
    const facts = this.facts;
    if (facts) {
      if (facts.cached_prompt_tokens) rest.push(`${facts.cached_prompt_tokens} prompt tokens cached`);
      if (facts.num_preemptions) rest.push(`preempted ${facts.num_preemptions}×`);
      if (facts.num_conversions) rest.push(`converted ${facts.num_conversions}×`);
      if (facts.num_kind_switches) rest.push(`switched kind ${facts.num_kind_switches}×`);
    }
    if (["length", "stopped", "failed"].includes(this.reason)) rest.push({ length: "cut off by the token limit", stopped: "stopped", failed: "not finished" }[this.reason]);
    this.verdict.replaceChildren();
    spoken.forEach((item, i) => this.verdict.append(i ? ", " : "", item));
    if (rest.length) this.verdict.append(`; ${rest.join(", ")}`);
    this.svg.setAttribute("aria-label", this.verdict.textContent);
    this.tellColors(gaps);
  }

  tellColors(gaps) {
    const late = this.arrivals.length && ((this.ttft !== null && this.arrivals[0][0] > this.ttft) || (this.tbt !== null && gaps.some((gap) => gap > this.tbt)));
    const kinds = [...new Set(this.marks.map(([event]) => event))];
    const entries = [["free", "", "waiting"], ["work", "tick", "token"]];
    if (late) entries.push(["queue", "tick", "token later than its objective"]);
    if (this.ttft !== null) entries.push(["objective-mark", "dashed", "TTFT objective"]);
    for (const kind of kinds) entries.push([COLORS[kind], "flag", MARKS[kind]]);
    this.legend.replaceChildren(...entries.map(([color, shape, label]) => {
      const item = html("li"), mark = html("i", `${color} ${shape}`.trim());
      item.append(mark, label);
      return item;
    }));
  }
}
