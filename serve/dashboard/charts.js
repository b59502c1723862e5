// Two charts in SVG: lines or stacked areas over time, and bars of a histogram. Both show one value at a time, selected with
// the pointer or the arrow keys. Text reaches the page only by textContent.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 20;
const TICKS_S = [15, 30, 60, 120, 300, 600, 900, 1800, 3600];
const GAP_S = 25; // points further apart are not joined: the server did not answer between them

export function svg(name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

export function html(name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

export function short(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return `${+value.toPrecision(3)}`;
}

export function seconds(value) {
  if (value < 0.001 && value > 0) return `${+(value * 1e6).toPrecision(2)} µs`;
  if (value < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
  return `${+value.toPrecision(3)} s`;
}

// 1, 2 or 5 times a power of ten, so that about `count` of them reach `most`.
function stepOf(most, count) {
  const raw = most / count, power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
}

class Chart {
  constructor(box, label) {
    this.legend = box.appendChild(html("ul", "legend"));
    this.plot = box.appendChild(html("div", "plot"));
    this.svg = this.plot.appendChild(svg("svg", { role: "img", tabindex: "0", "aria-label": label }));
    this.tip = this.plot.appendChild(html("div", "tip"));
    this.tip.hidden = true;
    this.tip.setAttribute("role", "status");
    this.label = label;
    this.at = null; // index of the point that is shown
    for (const name of ["pointermove", "pointerdown"]) {
      this.svg.addEventListener(name, (event) => this.show(this.indexAt(event.clientX - this.svg.getBoundingClientRect().left)));
    }
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.show(null);
      if (!by || !this.length) return;
      event.preventDefault();
      this.show(Math.min(this.length - 1, Math.max(0, (this.at ?? (by > 0 ? -1 : this.length)) + by)));
    });
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  get width() { return Math.max(120, this.plot.clientWidth); }
  get height() { return this.plot.clientHeight; }

  show(index) {
    this.at = index;
    this.redraw();
  }

  // Draws lines at each `step` up to `top`; returns a function from a value to its position.
  drawScale(top, step) {
    const y = (value) => this.height - BOTTOM - ((this.height - BOTTOM - TOP) * value) / top;
    for (let value = 0; value <= top * 1.0001; value += step) {
      this.svg.append(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }));
      this.svg.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    return y;
  }

  placeTip(x, text) {
    this.tip.hidden = false;
    this.tip.textContent = text;
    this.tip.style.left = `${Math.max(0, Math.min(this.width - this.tip.offsetWidth, x > this.width / 2 ? x - this.tip.offsetWidth - 10 : x + 10))}px`;
  }

  drawLegend(entries) {
    this.legend.replaceChildren(...entries.map(([className, mark, text, value]) => {
      const item = html("li");
      if (className) item.append(html("i", `${className} ${mark}`));
      item.append(`${text} `, html("b", "", value));
      return item;
    }));
    this.svg.setAttribute("aria-label", `${this.label}: ${entries.map((e) => `${e[2]} ${e[3]}`).join(", ")}. Arrow keys show single values.`);
  }
}

export class TimeChart extends Chart {
  // series: [{ key, label, color, dashed }], drawn in this order; stacked series from the bottom.
  // most: minimum top of the scale; gapS: points further apart are not joined.
  constructor(box, label, series, { stacked = false, most = 1, gapS = GAP_S } = {}) {
    super(box, label);
    Object.assign(this, { series, stacked, most, gapS, points: [] });
  }

  draw(points) {
    this.points = points;
    this.redraw();
  }

  get length() { return this.points.length; }
  get endS() { return this.points.at(-1).at_s; }
  get spanS() { return Math.max(60, this.endS - this.points[0].at_s); }
  x(atS) { return LEFT + (this.width - LEFT - RIGHT) * (1 - (this.endS - atS) / this.spanS); }

  indexAt(x) {
    let best = null;
    this.points.forEach((point, i) => {
      const far = Math.abs(this.x(point.at_s) - x);
      if (best === null || far < best.far) best = { i, far };
    });
    return best === null ? null : best.i;
  }

  redraw() {
    this.svg.replaceChildren();
    this.tip.hidden = true;
    const last = this.points.at(-1);
    this.drawLegend(this.series.map((s) => [s.color, this.stacked ? "" : s.dashed ? "dashed" : "line", s.label, last ? short(last[s.key]) : "–"]));
    if (!last) return;
    const sums = this.points.map((p) => this.series.map((s) => p[s.key]));
    const most = Math.max(this.most, ...sums.map((values) => (this.stacked ? values.reduce((a, b) => a + b, 0) : Math.max(...values))));
    const step = Math.max(stepOf(most, 4), this.stacked ? 1 : 0);
    const top = this.stacked ? most : Math.ceil(most / step) * step;
    const y = this.drawScale(top, step);
    const { spanS } = this, every = TICKS_S.find((s) => (s / spanS) * this.width > 62) ?? spanS;
    for (let ago = 0; ago < spanS * 0.97; ago += every) {
      const text = ago % 60 ? `−${ago} s` : ago ? `−${ago / 60} min` : "now";
      this.svg.append(svg("text", { x: this.x(this.endS - ago), y: this.height - 4, "text-anchor": ago ? "middle" : "end" }, text));
    }
    for (const run of this.runs()) this.drawRun(run, y);
    const shown = this.at === null ? null : this.points[this.at];
    if (shown) {
      const x = this.x(shown.at_s);
      this.svg.append(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }));
      const ago = this.endS - shown.at_s;
      this.placeTip(x, [ago < 0.5 ? "now" : `${Math.round(ago)} s ago`, ...this.series.map((s) => `${s.label} ${short(shown[s.key])}`)].join("\n"));
    }
  }

  // Points without a gap between them.
  runs() {
    const runs = [];
    for (const point of this.points) {
      const run = runs.at(-1);
      if (run && point.at_s - run.at(-1).at_s < this.gapS) run.push(point);
      else runs.push([point]);
    }
    return runs;
  }

  drawRun(run, y) {
    const path = (values) => values.map(([atS, value], i) => `${i ? "L" : "M"}${this.x(atS).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const floor = run.map(() => 0);
    for (const series of this.series) {
      const values = run.map((point, i) => [point.at_s, point[series.key] + floor[i]]);
      if (this.stacked) {
        const back = run.map((point, i) => [point.at_s, floor[i]]).reverse();
        this.svg.append(svg("path", { class: `area ${series.color}`, d: `${path(values)}${path(back).replace("M", "L")}Z` }));
        values.forEach(([, value], i) => { floor[i] = value; });
      } else {
        this.svg.append(svg("path", { class: `line ${series.color}${series.dashed ? " dashed" : ""}`, d: path(values) }));
      }
    }
  }
}

export class Histogram extends Chart {
  constructor(box, label) {
    super(box, label);
    this.legend.classList.add("facts");
    this.bars = [];
  }

  // buckets: [[upper bound in seconds, or Infinity, values up to it]], cumulative as in Prometheus.
  draw(buckets, sum) {
    const bars = buckets.map(([bound, count], i) => ({ from: i ? buckets[i - 1][0] : 0, to: bound, count: count - (i ? buckets[i - 1][1] : 0) }));
    const full = bars.map((bar, i) => (bar.count ? i : -1)).filter((i) => i >= 0);
    this.total = buckets.length ? buckets.at(-1)[1] : 0;
    let first = Math.max(0, (full[0] ?? 0) - 1), last = Math.min(bars.length, (full.at(-1) ?? 7) + 2);
    last = Math.min(bars.length, Math.max(last, first + 8));
    first = Math.max(0, Math.min(first, last - 8));
    this.bars = bars.slice(first, last);
    const quantile = (q) => (this.total ? seconds(+quantileOf(bars, q * this.total).toPrecision(2)) : "–");
    this.facts = [["Count", `${this.total.toLocaleString("en")}`], ...(sum === null ? [] : [["mean", this.total ? seconds(sum / this.total) : "–"]]), ["p50 ≈", quantile(0.5)], ["p99 ≈", quantile(0.99)]];
    this.redraw();
  }

  get length() { return this.bars.length; }
  get slot() { return (this.width - LEFT - RIGHT) / this.bars.length; }

  indexAt(x) {
    const index = Math.floor((x - LEFT) / this.slot);
    return index >= 0 && index < this.bars.length ? index : null;
  }

  redraw() {
    this.svg.replaceChildren();
    this.tip.hidden = true;
    if (!this.bars.length) return;
    this.drawLegend(this.facts.map(([name, value]) => ["", "", name, value]));
    const most = Math.max(1, ...this.bars.map((bar) => bar.count));
    const step = Math.max(1, stepOf(most, 4));
    const y = this.drawScale(Math.ceil(most / step) * step, step);
    const every = Math.ceil(46 / this.slot);
    this.bars.forEach((bar, i) => {
      const x = LEFT + i * this.slot;
      this.svg.append(svg("rect", { class: `bar work${i === this.at ? " at" : ""}`, x: x + 1, y: y(bar.count), width: Math.max(1, this.slot - 2), height: Math.max(0, this.height - BOTTOM - y(bar.count)), rx: 1 }));
      if (i % every === every - 1 && Number.isFinite(bar.to)) this.svg.append(svg("text", { x: x + this.slot, y: this.height - 4, "text-anchor": i === this.bars.length - 1 ? "end" : "middle" }, seconds(bar.to)));
    });
    const bar = this.at === null ? null : this.bars[this.at];
    if (bar) {
      const range = Number.isFinite(bar.to) ? `${seconds(bar.from)} to ${seconds(bar.to)}` : `over ${seconds(bar.from)}`;
      this.placeTip(LEFT + (this.at + 0.5) * this.slot, `${range}\n${bar.count.toLocaleString("en")} of ${this.total.toLocaleString("en")}`);
    }
  }
}

// Quantile in seconds of cumulative counts [[upper bound, values up to it]]; null: there are no values.
export function quantile(buckets, share) {
  const total = buckets.length ? buckets.at(-1)[1] : 0;
  if (!total) return null;
  return quantileOf(buckets.map(([bound, count], i) => ({ from: i ? buckets[i - 1][0] : 0, to: bound, count: count - (i ? buckets[i - 1][1] : 0) })), share * total);
}

// Linear within a bucket, as Prometheus' histogram_quantile; in the last bucket its lower bound.
function quantileOf(bars, rank) {
  let below = 0;
  for (const bar of bars) {
    if (bar.count && below + bar.count >= rank) return Number.isFinite(bar.to) ? bar.from + ((bar.to - bar.from) * (rank - below)) / bar.count : bar.from;
    below += bar.count;
  }
  return 0;
}
