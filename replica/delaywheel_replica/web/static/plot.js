// A plot of up to the last 15 minutes: lines over time on a canvas, each with its own dashes and colour.
// uPlot is 145 kB as an ES module, which is all that the views may have together.

import { h } from "./dom.js";
import { clock, ZONE } from "./times.js";

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const GAP_MS = 15000;
const LEFT = 64, BOTTOM = 24, TOP = 10;

// `lines` are [name, value of a step or null]; `shown` writes a value of the axis.
export function plot(title, lines, shown) {
  const canvas = h("canvas", { class: "plot", role: "img", "aria-label": `${title}: in numbers in the table below` });
  const legend = h("p", { class: "legend" }, lines.map(([name], place) => h("span", {}, swatch(place), name)));
  const draw = (steps, nowMs) => {
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const paint = canvas.getContext("2d"), style = getComputedStyle(canvas);
    paint.scale(scale, scale);
    const values = steps.flatMap((step) => lines.map(([, of]) => of(step))).filter(Number.isFinite);
    const top = roundUp(Math.max(...values, 0)); // half of it is round, too
    const length = Math.max(60000, nowMs - (steps[0]?.from_ms ?? nowMs));
    const x = (ms) => LEFT + (width - LEFT - 8) * (1 - (nowMs - ms) / length);
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - Math.min(value, top) / top);
    axes(paint, style, { width, height, x, y, top, nowMs, length, shown });
    lines.forEach(([, of], place) => {
      paint.strokeStyle = style.getPropertyValue(`--line${place}`);
      paint.lineWidth = 2;
      paint.setLineDash(DASHES[place]);
      paint.beginPath();
      let drawn = false;
      for (const step of steps) {
        const value = of(step), whole = value !== null && step.told && step.to_ms - step.from_ms < GAP_MS;
        if (whole) drawn ? paint.lineTo(x(step.to_ms), y(value)) : paint.moveTo(x(step.from_ms), y(value));
        if (whole && !drawn) paint.lineTo(x(step.to_ms), y(value));
        drawn = whole;
      }
      paint.stroke();
    });
  };
  return { element: h("figure", {}, h("figcaption", {}, `${title}, times in ${ZONE}`), canvas, legend), draw };
}

function axes(paint, style, { width, height, x, y, top, nowMs, length, shown }) {
  paint.font = "12px system-ui, sans-serif";
  paint.fillStyle = style.getPropertyValue("--dim");
  paint.strokeStyle = style.getPropertyValue("--line");
  paint.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    paint.textAlign = "right";
    paint.fillText(shown(top * part), LEFT - 6, y(top * part));
    paint.beginPath();
    paint.moveTo(LEFT, y(top * part));
    paint.lineTo(width - 8, y(top * part));
    paint.stroke();
  }
  for (const [part, align] of [[1, "left"], [0.5, "center"], [0, "right"]]) {
    paint.textAlign = align;
    paint.fillText(clock(nowMs - part * length), x(nowMs - part * length), height - 8);
  }
}

function swatch(place) {
  const made = h("canvas", { width: 32, height: 10, "aria-hidden": "true", class: "swatch" });
  requestAnimationFrame(() => {
    const paint = made.getContext("2d");
    paint.strokeStyle = getComputedStyle(made).getPropertyValue(`--line${place}`);
    paint.lineWidth = 2;
    paint.setLineDash(DASHES[place]);
    paint.moveTo(0, 5);
    paint.lineTo(32, 5);
    paint.stroke();
  });
  return made;
}

function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [2, 4, 10].map((step) => step * power).find((step) => step >= value);
}
