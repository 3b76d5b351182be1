// The first page's picture: pick one of the digits in the histogram, and see what norm its epsilon stands for, what an attacker can
// do, and what a filter would promise.  The run is that of the page; epsilons are read off the histogram (moving.js), at the upper
// end of each bar.  Needs `accountant`, `planner`, `chart` and, for the filter, `exactFilter`.
const pick = (() => {
  "use strict";
  const account = typeof require === "undefined" ? accountant : require("./accountant.js");
  const GRID = 1 << 13;

  // The norm, as a share of the clip norm and from above, of an example that has an epsilon by never being longer than that norm.
  function normOf({ rate, noise, steps, delta }, epsilon) {
    const of = (norm) => account.epsilonByLosses(rate, noise / norm, steps, delta, GRID).epsilon;
    let low = 0.005, high = 1;
    if (of(high) <= epsilon) return 1;
    while (high > 1.01 * low) {
      const middle = Math.sqrt(low * high);
      if (of(middle) >= epsilon) high = middle; else low = middle;
    }
    return high;
  }

  // The bar in which the k-th of n values lies, of bars with relative heights.
  function barOf(heights, k, n) {
    const total = heights.reduce((sum, height) => sum + height, 0);
    let below = 0;
    for (let i = 0; i < heights.length; i++) {
      below += heights[i] / total * n;
      if (below >= k - 1e-6) return i;
    }
    return heights.length - 1;
  }

  return { normOf, barOf };
})();

if (typeof module !== "undefined") module.exports = pick;

(() => {
  "use strict";
  const form = typeof document === "undefined" ? null : document.getElementById("pick");
  const figure = form && document.querySelector("figure[data-moving]");
  if (!figure) return;
  const element = (id) => document.getElementById(id), slider = form.elements.digit, filter = form.elements.filter;
  const { frames } = JSON.parse(figure.dataset.moving), last = frames[frames.length - 1];
  const bars = [...figure.querySelectorAll(".bars rect")];
  const at = (bar) => Number(bar.getAttribute("x")), zero = at(bars[0]);
  const run = Object.fromEntries(["rate", "steps", "delta"].map((name) => [name, Number(form.dataset[name])]));
  const uniform = Number(form.dataset.epsilon), unit = uniform / (last.uniform - zero), N = Number(slider.max);
  const shown = planner.shown, percent = (value) => `${shown(100 * value, 2)}%`;
  const rates = Array.from({ length: 31 }, (_, i) => Math.pow(1e-4, 1 - i / 30));
  const axis = { from: 1e-4, to: 1, logarithmic: true, name: (rate) => `${Number((100 * rate).toPrecision(1))}%` };
  let everyone = null, asked = 0;

  function draw(attacker, said) {
    const curve = (look, of) => ({ look, points: rates.map((rate) => [rate, of(rate)]) });
    chart.draw(element("pick-curve"), { x: { ...axis, label: "false-positive rate" }, y: { ...axis, label: "true-positive rate, at most" },
      curves: [curve("guessing", (rate) => rate), curve("all-pld", everyone), curve("one-pld", attacker)] });
    element("pick-curve").querySelector("title").textContent = said;
  }

  function answer() {
    const mine = ++asked, k = Number(slider.value), index = pick.barOf(last.bars, k, N);
    bars.forEach((bar, i) => bar.classList.toggle("picked", i === index));
    const end = index + 1 < bars.length ? at(bars[index + 1]) : at(bars[index]) + Number(bars[index].getAttribute("width"));
    const epsilon = Math.min(uniform, (end - zero) * unit), norm = pick.normOf(run, epsilon);
    const attacker = account_(norm), found = percent(attacker(0.001));
    const said = `Digit ${k} of ${N}: epsilon ${shown(epsilon, 2)}, as for gradients of ${shown(norm, 2)} of the clip norm in every step. Against such `
      + `gradients an attacker with 0.1% false positives reaches at most ${found} true positives; at the clip norm, ${percent(everyone(0.001))}.`;
    element("pick-said").textContent = said;
    slider.setAttribute("aria-valuetext", `digit ${k}, epsilon at most ${shown(epsilon, 2)}`);
    draw(attacker, said);
    element("pick-filter").textContent = filter.checked ? "Solving the filter's game ..." : "";
    if (filter.checked) setTimeout(() => promise(mine, norm), 0);
  }

  const account_ = (norm) => accountant.attackerOf(run.rate, run.noise / norm, run.steps);

  function promise(mine, norm) {
    const working = exactFilter.promised(run.rate, run.noise, run.steps, run.delta, norm);
    const next = () => {
      if (mine !== asked) return undefined;
      const { value: found, done } = working.next();
      if (!done) return setTimeout(next, 0);
      if (found.reason) return (element("pick-filter").textContent = `No filter is computed here: ${found.reason}.`);
      const noise = run.noise / found.level, exact = found.promises[found.blocks];
      return (element("pick-filter").textContent = `With a filter the norm is rounded up to ${found.level} of the clip norm, and the budget `
        + `is a promise before training: epsilon ${shown(exact)} by the exact filter, ${shown(accountant.epsilonByRenyi(run.rate, noise, run.steps, run.delta))} `
        + `by the Rényi filter. If the norm could not change, ${shown(accountant.epsilonByLosses(run.rate, noise, run.steps, run.delta).epsilon)} would do.`);
    };
    next();
  }

  // The noise of the run is found as the page found it: by its epsilon.
  const search = planner.noiseFor({ ...run, measure: "epsilon", limit: uniform });
  const prepare = () => {
    const { value, done } = search.next();
    if (!done) return setTimeout(prepare, 0);
    run.noise = value;
    everyone = account_(1);
    return answer();
  };
  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(() => everyone && answer(), 120); };
  slider.addEventListener("input", soon);
  filter.addEventListener("change", soon);
  form.hidden = false;
  element("pick-said").textContent = "Preparing the picture ...";
  setTimeout(prepare, 0);
})();
