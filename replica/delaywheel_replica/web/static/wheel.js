// The wheel: what is pending by second, by minute, and over the span; a drawing and its table.

import { h, put, table } from "./dom.js";
import { counted, short, when } from "./times.js";

const DRAWN = [["minute", "The next minute, by the second"], ["hour", "The next hour, by the minute"], ["span", "The span, by the hour"]];
const still = matchMedia("(prefers-reduced-motion: reduce)");

export function wheel(state) {
  const parts = Object.fromEntries(DRAWN.map(([name, title]) => {
    const canvas = h("canvas", { width: 400, height: 320, role: "img", "aria-label": "not told yet" });
    const listed = h("div", {});
    const heading = h("h2", {}, title);
    const element = h("section", {}, heading, canvas, h("details", {}, h("summary", {}, "Table"), listed));
    return [name, { canvas, listed, element, heading }];
  }));
  const update = (name) => {
    if (parts[name] && state.told[name]) show(parts[name], name, state.told[name], state);
  };
  for (const [name] of DRAWN) update(name);
  const element = h("div", {}, h("h1", {}, "The wheel"), h("div", { class: "rings" }, DRAWN.map(([name]) => parts[name].element)));
  const tick = () => { if (!still.matches && state.told.minute) draw(parts.minute.canvas, state.told.minute, state, true); };
  return { element, update, tick };
}

function rowsOf(told) {
  const known = (told.slots.bucket_seconds ?? 0) === told.bucket_s || told.bucket_s === 1;
  return known ? (told.slots.slots ?? []).map((row) => ({
    slot: Number(row.slot),
    pending: Math.max(0, Number(row.messages ?? 0) - Number(row.cancels ?? 0)),
  })).filter((row) => row.pending) : null;
}

function show(part, name, told, state) {
  if (told.bucket_s > 3600) put(part.heading, "The span, by the day");
  draw(part.canvas, told, state, name === "minute");
  const rows = rowsOf(told);
  if (rows === null) return put(part.listed, h("p", {}, "not told: the node has an earlier release"));
  const all = rows.reduce((sum, row) => sum + row.pending, 0);
  part.canvas.setAttribute("aria-label", `${counted(all, "message")} pending, in ${counted(rows.length, "row")} of the table below`);
  const link = (row) => told.bucket_s === 1
    ? h("a", { href: `#second?slot=${row.slot}` }, when(row.slot * 1000)) : when(row.slot * 1000);
  const silent = (told.slots.silent ?? []).map((each) => h("p", { class: "bad" }, `${each.node} was not counted: ${each.why}`));
  put(part.listed, silent, table(["from", "pending"], rows.map((row) => [link(row), row.pending.toLocaleString("en")]), "nothing is pending here"));
}

// A ring of sectors, one for each bucket; the second that is now is at the top, and moves on.
function draw(canvas, told, state, moves) {
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const { width, height } = canvas, x = width / 2, y = height / 2, inner = 60, outer = 150;
  paint.clearRect(0, 0, width, height);
  const rows = rowsOf(told) ?? [];
  const most = Math.max(1, ...rows.map((row) => row.pending));
  const ahead = Number(state.told.cluster?.status.now_ms ?? 0) - Number(state.told.cluster?.at_ms ?? 0);
  const nowS = moves ? (Date.now() + ahead) / 1000 : told.from_slot;
  const angle = (slot) => ((slot - nowS) / told.length_s) * 2 * Math.PI - Math.PI / 2;
  paint.strokeStyle = style.getPropertyValue("--line");
  for (const radius of [inner, outer]) {
    paint.beginPath();
    paint.arc(x, y, radius, 0, 2 * Math.PI);
    paint.stroke();
  }
  paint.fillStyle = style.getPropertyValue("--accent");
  for (const row of rows) {
    if (row.slot + told.bucket_s <= nowS) continue;
    const from = angle(Math.max(row.slot, nowS)), to = angle(row.slot + told.bucket_s) - 0.01;
    const radius = inner + (outer - inner) * Math.sqrt(row.pending / most);
    paint.beginPath();
    paint.arc(x, y, radius, from, Math.max(to, from + 0.01));
    paint.arc(x, y, inner, Math.max(to, from + 0.01), from, true);
    paint.fill();
  }
  paint.strokeStyle = paint.fillStyle = style.getPropertyValue("--text");
  paint.beginPath();
  paint.moveTo(x, y - inner);
  paint.lineTo(x, y - outer - 6);
  paint.stroke();
  paint.textAlign = "center";
  paint.font = "14px system-ui";
  const all = rows.reduce((sum, row) => sum + row.pending, 0);
  paint.fillText(all.toLocaleString("en"), x, y);
  paint.fillText("pending", x, y + 18);
  paint.textAlign = "left";
  paint.fillText(short(nowS * 1000), x + 8, 12);
}
