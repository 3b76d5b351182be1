// A small picture of curves, as SVG that a style sheet colours: axes, ticks, lines.  Numbers only; words stand on the page.
const chart = (() => {
  "use strict";
  const WIDTH = 440, HEIGHT = 300, LEFT = 84, RIGHT = 26, TOP = 12, BOTTOM = 56;

  // Round places between two ends: 1, 2 or 5 times a power of ten apart, or, on a logarithmic axis, powers of ten.
  function ticks(low, high, logarithmic) {
    if (logarithmic) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      return Array.from({ length: last - first + 1 }, (_, i) => Number(`1e${first + i}`));
    }
    const rough = (high - low) / 6, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const apart = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
    const first = Math.ceil(low / apart - 1e-9), last = Math.floor(high / apart + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * apart).toPrecision(12)));
  }

  // 20000 as "20k", and nothing with more digits than it needs.
  function named(value) {
    if (value === 0) return "0";
    const power = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
    if (power >= 7 || power < -4) return value.toExponential(0).replace("e+", "e");
    const [unit, letter] = power >= 6 ? [1e6, "M"] : power >= 4 ? [1e3, "k"] : [1, ""];
    return Number((value / unit).toPrecision(4)) + letter;
  }

  // Draws `curves`, [{points: [[x, y], ...], look}, ...], into an SVG element; `look` is the class of the line.
  function draw(svg, { x, y, curves }) {
    const spread = (axis, low, high) => {
      const at = axis.logarithmic ? Math.log : (value) => value;
      return (value) => low + (high - low) * (at(Math.max(value, axis.from)) - at(axis.from)) / (at(axis.to) - at(axis.from));
    };
    const across = spread(x, LEFT, WIDTH - RIGHT), up = spread(y, HEIGHT - BOTTOM, TOP);
    const parts = [];
    const add = (name, attributes, text = "") => parts.push(`<${name} ${Object.entries(attributes)
      .map(([key, value]) => `${key}="${typeof value === "number" ? Number(value.toFixed(2)) : value}"`).join(" ")}>${text}</${name}>`);
    for (const tick of ticks(x.from, x.to, x.logarithmic)) {
      add("line", { class: "grid", x1: across(tick), x2: across(tick), y1: TOP, y2: HEIGHT - BOTTOM });
      add("text", { x: across(tick), y: HEIGHT - BOTTOM + 20, "text-anchor": "middle" }, (x.name || named)(tick));
    }
    for (const tick of ticks(y.from, y.to, y.logarithmic)) {
      add("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: up(tick), y2: up(tick) });
      add("text", { x: LEFT - 6, y: up(tick) + 5, "text-anchor": "end" }, (y.name || named)(tick));
    }
    add("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, x.label);
    add("text", { transform: `translate(14 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label);
    for (const { points, look } of curves) {
      const inside = points.filter(([, value]) => Number.isFinite(value));
      if (inside.length) add("polyline", { class: look, points: inside.map(([a, b]) => `${across(a).toFixed(2)},${up(b).toFixed(2)}`).join(" ") });
    }
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.querySelectorAll(":scope > :not(title)").forEach((element) => element.remove());
    svg.insertAdjacentHTML("beforeend", parts.join(""));
  }

  return { draw, ticks, named };
})();

if (typeof module !== "undefined") module.exports = chart;
