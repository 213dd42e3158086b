// A line chart of the last minutes, and rows of bars. Colours come from the style sheet.

import { el, figure, svg } from "./dom.js";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [150, 44, 10, 8, 34];

export class Chart {
  // `series`: [{name, of(point)}], styled as line 0, 1, ... `floor`: the y axis reaches at least this
  // value. `mark`: a value marked by a line. `about`: the text while the pointer is not on the chart.
  constructor(element, { title, unit, series, floor, mark, about = "" }) {
    Object.assign(this, { title, unit, series, floor, mark, about, points: [], span: 180, pointed: null });
    this.now = el("span", { class: "now" }, about);
    this.canvas = svg("svg", { role: "img", height: String(HEIGHT) });
    const names = series.length > 1 ? series.map(({ name }, i) =>
      el("span", { class: `line-name line-${i}` }, name)) : [];
    element.append(el("figcaption", {}, el("b", {}, title), ...names, this.now), this.canvas);
    new ResizeObserver(() => this.draw()).observe(element);
    this.canvas.addEventListener("pointermove", event => this.hover(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
  }

  // `points`: [{at, ...}], the last one being now; `span`: seconds shown on the x axis.
  set(points, span) {
    [this.points, this.span] = [points, span];
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.points.length) return;
    const end = this.points.at(-1).at;
    this.x = at => width - RIGHT - ((end - at) / this.span) * (width - LEFT - RIGHT);
    const values = this.points.flatMap(point => this.series.map(({ of }) => of(point) ?? 0));
    const step = niceStep(Math.max(this.floor, ...values) / 3);
    const top = step * Math.ceil(Math.max(this.floor, ...values) / step - 1e-9);
    this.y = value => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    this.pointer = svg("line", { class: "pointer", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.canvas.replaceChildren(...this.grid(width, top, step), ...this.times(width), ...this.lines(), this.pointer);
    this.canvas.setAttribute("aria-label",
      `${this.title} over the last ${this.span} seconds; now ${this.describe(this.points.at(-1))}`);
    this.hover(this.pointed);
  }

  grid(width, top, step) {
    const found = [];
    for (let value = 0; value <= top + 1e-9; value += step) {
      const y = this.y(value);
      found.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, tick(value)));
    }
    if (this.mark !== undefined && this.mark <= top) {
      const y = this.y(this.mark);
      found.push(svg("line", { class: "mark", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    }
    const middle = (HEIGHT - BOTTOM + TOP) / 2;
    found.push(svg("text", { class: "tick", transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle" }, this.unit));
    return found;
  }

  times(width) {
    const end = this.points.at(-1).at;
    const found = [1, 2 / 3, 1 / 3, 0].map(part => {
      const ago = Math.round(part * this.span);
      const anchor = part === 0 ? "end" : "middle";
      return svg("text", { class: "tick", x: this.x(end - ago), y: HEIGHT - BOTTOM + 14, "text-anchor": anchor }, ago ? `−${ago}` : "now");
    });
    const middle = LEFT + (width - LEFT - RIGHT) / 2;
    return [...found, svg("text", { class: "tick", x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, "seconds")];
  }

  // A line for each series, with gaps where the value is null.
  lines() {
    return this.series.map(({ of }, index) => {
      let [path, pen] = ["", "M"];
      for (const point of this.points) {
        const value = of(point);
        if (value !== null) path += `${pen}${this.x(point.at).toFixed(1)} ${this.y(value).toFixed(1)}`;
        pen = value === null ? "M" : "L";
      }
      return svg("path", { class: `line line-${index}`, d: path });
    });
  }

  describe(point) {
    const values = this.series.map(({ of }) => of(point));
    const known = values.some(value => value !== null);
    const unit = values.length > 1 ? "" : ` ${this.unit}`;
    return known ? values.map(figure).join(" / ") + unit : "no data";
  }

  // Shows the values at the pointer's `x`; null: the pointer is not on the chart.
  hover(x) {
    this.pointed = x;
    if (!this.points.length || !this.x) return;
    const far = point => Math.abs(this.x(point.at) - x);
    const point = this.points.reduce((best, each) => (far(each) < far(best) ? each : best));
    this.now.textContent = x === null ? this.about : this.describe(point);
    for (const side of ["x1", "x2"]) this.pointer.setAttribute(side, this.x(point.at));
    this.pointer.setAttribute("visibility", x === null ? "hidden" : "visible");
  }
}

// The smallest 1, 2 or 5 times a power of ten that is not below `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= least - 1e-12);
}

const tick = value => String(Number(value.toPrecision(3)));

// Shows a row for each [name, share, text, source], coloured as `source`; without rows `nothing`.
export function bars(element, rows, nothing) {
  if (!rows.length) {
    element.replaceChildren(el("p", { class: "nothing" }, nothing));
    return;
  }
  element.replaceChildren(el("dl", { class: "bars" }, ...rows.flatMap(([name, share, text, source = "any"]) => {
    const bar = el("i", { class: `bar by-${source}`, "aria-hidden": "true" });
    bar.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(1)}%`;
    return [el("dt", {}, name), el("dd", {}, el("span", { class: "track" }, bar), text)];
  })));
}
