// The calculator page: reads the form, asks `accountant` and `exactFilter`, writes the answers and draws them with `chart`.  Plain HTML
// controls, so that keyboards and screen readers know what to do with them.
(() => {
  "use strict";
  const form = document.getElementById("calculator");
  if (!form) return;

  const LOGARITHMIC = { rate: true, noise: true, steps: true, delta: true };
  const field = (name) => form.elements[name];
  const slider = (name) => form.elements[`${name}-slider`];
  const NAMES = ["rate", "noise", "steps", "delta", "norm"];

  const clamp = (name, value) => Math.min(Number(field(name).max), Math.max(Number(field(name).min), value));
  const toSlider = (name, value) => (LOGARITHMIC[name] ? Math.log10(value) : value);
  const short = (value) => Number(value.toPrecision(3));
  const fromSlider = (name, place) => {
    const value = LOGARITHMIC[name] ? Math.pow(10, place) : place;
    return clamp(name, name === "steps" ? Math.max(1, Math.round(short(value))) : short(value));
  };

  // Never below the bound: the last digit is rounded up.
  const shown = (value) => {
    if (!Number.isFinite(value)) return "no bound";
    if (value === 0) return "0";
    const digits = Math.min(20, Math.max(0, 3 - Math.ceil(Math.log10(value))));
    return (Math.ceil(value * Math.pow(10, digits)) / Math.pow(10, digits)).toFixed(digits);
  };

  // An error in one digit, rounded up too.
  const atMost = (value) => {
    const near = Number(value.toPrecision(1));
    return (near >= value ? near : near + Math.pow(10, Math.floor(Math.log10(value)))).toPrecision(1);
  };

  // A probability in percent, rounded up.
  const percent = (value) => (value >= 0.9995 ? "100%" : `${shown(100 * value)}%`);

  const POINTS = 12, GRID = 1 << 14, LOWEST = 1e-4, RATES = [0.001, 0.01, 0.1];
  const element = (id) => document.getElementById(id);

  // The curves take longer than the numbers: they are computed a piece at a time, and left if the form has changed.
  let drawing = 0;
  function drawAll(value, ends) {
    const mine = ++drawing, noises = { all: value.noise, one: value.noise / value.norm };
    const tasks = [], places = [], steps = { "all-rdp": [], "all-pld": [], "one-pld": [] }, attackers = {};
    for (let i = 1; i <= POINTS; i++) places.push(Math.ceil(value.steps * (i / POINTS) ** 2));
    const distinct = [...new Set(places)];
    for (const place of distinct) {
      const last = place === value.steps;
      tasks.push(() => {
        steps["all-rdp"].push([place, accountant.epsilonByRenyi(value.rate, value.noise, place, value.delta)]);
        for (const [who, noise] of Object.entries(noises)) {
          steps[`${who}-pld`].push([place, last ? ends[who]
            : accountant.epsilonByLosses(value.rate, noise, place, value.delta, GRID).epsilon]);
        }
      });
    }
    tasks.push(() => drawSteps(value, steps));
    for (const who of Object.keys(noises)) {
      tasks.push(() => { attackers[who] = accountant.attackerOf(value.rate, noises[who], value.steps); });
    }
    tasks.push(() => drawAttacker(value, attackers));
    filterTasks(value, tasks, (points) => drawSteps(value, { ...steps, "one-exact": points }));
    element("calculator-pictures").setAttribute("aria-busy", "true");
    const next = () => {
      if (mine !== drawing) return;
      const task = tasks.shift();
      if (!task) {
        element("calculator-pictures").setAttribute("aria-busy", "false");
        return;
      }
      task();
      setTimeout(next, 0);
    };
    setTimeout(next, 0);
  }

  // The exact filter's promise takes longest: its generator pauses, and goes on with the next task.
  function filterTasks(value, tasks, draw) {
    const working = exactFilter.promised(value.rate, value.noise, value.steps, value.delta, value.norm);
    const [cell, error, said] = ["one-exact", "exact-error", "calculator-filter"].map(element);
    cell.textContent = error.textContent = "...";
    const piece = () => {
      const { value: found, done } = working.next();
      if (!done) return tasks.unshift(piece);
      if (found.reason) {
        cell.textContent = error.textContent = "-";
        said.textContent = `The exact filter is not drawn: ${found.reason}.`;
        return undefined;
      }
      const { levels, costs, level, block, blocks, budget, promises } = found;
      cell.textContent = shown(promises[blocks]);
      error.textContent = atMost(found.error);
      said.textContent = `The filter: norms are measured ${blocks === 1 ? "once" : `${blocks} times, every ${block} step${block > 1 ? "s" : ""}`}, `
        + `and rounded up to ${levels.join(", ")} of the clip norm, which ${costs.length > 1 ? "cost" : "costs"} `
        + `${costs.join(", ")}. The budget, ${budget}, pays for all steps at ${level}.`;
      element("calculator-python").textContent += `\nfrom dpcompanion.filters import ExactFilter\n`
        + `filter = ExactFilter(1, sample_rate=${value.rate}, noise_multiplier=${value.noise}, max_grad_norm=1.0, `
        + `levels=[${levels.join(", ")}], costs=[${costs.join(", ")}], budget=${budget}, steps=${value.steps}, block=${block})\n`
        + `filter.epsilon(${value.delta})`;
      return draw(promises.map((epsilon, i) => [Math.min(value.steps, i * block), epsilon]));
    };
    tasks.push(piece);
  }

  const say = (id, text) => { element(id).querySelector("title").textContent = text; };

  // More steps never cost less, so a bound for more of them is one for fewer: a curve that falls is the grid's doing.
  function drawSteps(value, curves) {
    for (const points of Object.values(curves)) {
      for (let i = points.length - 2; i >= 0; i--) points[i][1] = Math.min(points[i][1], points[i + 1][1]);
    }
    const highest = Math.max(...Object.values(curves).flat().map(([, epsilon]) => epsilon).filter(Number.isFinite), 1e-6);
    chart.draw(element("picture-steps"), {
      x: { from: 0, to: value.steps, label: "steps" }, y: { from: 0, to: 1.05 * highest, label: "epsilon" },
      curves: Object.entries(curves).map(([look, points]) => ({ look, points: [[0, 0], ...points] })),
    });
    const adapting = curves["one-exact"] ? `, and ${shown(curves["one-exact"].at(-1)[1])} by the exact filter if its norms adapt` : "";
    const end = (name) => shown(curves[name][curves[name].length - 1][1]);
    say("picture-steps", `Epsilon over steps. After ${value.steps} steps the uniform epsilon is at most ${end("all-rdp")} by RDP and `
      + `${end("all-pld")} by PLD, and this example's is at most ${end("one-pld")} by PLD${adapting}.`);
  }

  function drawAttacker(value, attackers) {
    const rates = Array.from({ length: 41 }, (_, i) => Math.pow(LOWEST, 1 - i / 40));
    const axis = { from: LOWEST, to: 1, logarithmic: true, name: (rate) => `${Number((100 * rate).toPrecision(1))}%` };
    const curves = [{ look: "guessing", points: rates.map((rate) => [rate, rate]) }];
    for (const [who, attacker] of Object.entries(attackers)) {
      curves.push({ look: `${who}-pld`, points: rates.map((rate) => [rate, attacker(rate)]) });
    }
    chart.draw(element("picture-attacker"), {
      x: { ...axis, label: "false-positive rate" }, y: { ...axis, label: "true-positive rate, at most" }, curves,
    });
    say("picture-attacker", "The attacker's best true-positive rate over the false-positive rate, at most: "
      + RATES.map((rate) => `at ${percent(rate)}, ${percent(attackers.all(rate))} for any example and `
        + `${percent(attackers.one(rate))} for this example`).join("; ") + ".");
    RATES.forEach((rate, i) => {
      for (const who of Object.keys(attackers)) element(`${who}-tpr-${i}`).textContent = percent(attackers[who](rate));
    });
  }

  // Nothing on the page may go on answering a question that the form no longer asks.
  function clear() {
    drawing++;
    const live = form.querySelectorAll(".live"), errors = ["all-error", "one-error", "exact-error"].map(element);
    for (const cell of [...live, ...errors, element("calculator-python")]) cell.textContent = "\u2013";
    for (const id of ["calculator-filter", "calculator-copied"]) element(id).textContent = "";
    for (const id of ["picture-steps", "picture-attacker"]) {
      element(id).querySelectorAll(":scope > :not(title)").forEach((part) => part.remove());
      say(id, "\u2013");
    }
    element("calculator-pictures").setAttribute("aria-busy", "false");
  }

  function answer() {
    const value = Object.fromEntries(NAMES.map((name) => [name, Number(field(name).value)]));
    const wrong = NAMES.find((name) => !(value[name] >= Number(field(name).min) && value[name] <= Number(field(name).max))
      || (name === "steps" && !Number.isInteger(value[name])));
    for (const name of NAMES) field(name).setAttribute("aria-invalid", String(name === wrong));
    const said = element("calculator-said");
    if (wrong) {
      clear();
      said.textContent = `${field(wrong).labels[0].textContent} must lie between ${field(wrong).min} and ${field(wrong).max}`
        + (wrong === "steps" ? ", a whole number." : ".");
      return;
    }
    const write = (id, text) => { element(id).textContent = text; };
    const found = { all: value.noise, one: value.noise / value.norm };
    const epsilon = {}, ends = {};
    for (const [who, noise] of Object.entries(found)) {
      const byRenyi = accountant.epsilonByRenyi(value.rate, noise, value.steps, value.delta);
      const byLosses = accountant.epsilonByLosses(value.rate, noise, value.steps, value.delta);
      epsilon[who] = Math.min(...[byRenyi, byLosses.epsilon].filter(Number.isFinite));
      ends[who] = byLosses.epsilon;
      write(`${who}-rdp`, shown(byRenyi));
      write(`${who}-pld`, shown(byLosses.epsilon));
      if (who === "one") write("adapting-rdp", shown(byRenyi));
      write(`${who}-error`, Number.isFinite(byLosses.error) ? atMost(byLosses.error) : "large");
    }
    said.textContent = `For every example, epsilon is at most ${shown(epsilon.all)}. For an example whose gradients are never longer than `
      + `${value.norm} of the clip norm, it is at most ${shown(epsilon.one)}. `
      + `Delta must be below 1/n: this one is for fewer than ${Math.floor(1 / value.delta * (1 + 1e-9)).toLocaleString("en")} people.`;
    write("calculator-python", `from dpcompanion.accounting import compute_epsilon\n`
      + `compute_epsilon(sample_rate=${value.rate}, noise_multiplier=${value.noise}, steps=${value.steps}, delta=${value.delta})\n`
      + `compute_epsilon(sample_rate=${value.rate}, noise_multiplier=${value.noise} / ${value.norm}, steps=${value.steps}, delta=${value.delta})`);
    drawAll(value, ends);
  }

  // Copies the lines; where a browser keeps its clipboard from the page, they are marked, for the reader to copy.
  async function copy() {
    const lines = element("calculator-python"), said = element("calculator-copied");
    try {
      await navigator.clipboard.writeText(lines.textContent);
      said.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(lines);
      said.textContent = "Marked: press Ctrl+C to copy.";
    }
  }

  // Examples, batch and epochs fill in rate and steps; a rate or steps entered by hand are no longer theirs.
  const SHAPE = ["n", "batch", "epochs"];
  function shape() {
    const [n, batch, epochs] = SHAPE.map((name) => Number(field(name).value));
    if (!(n > 0 && batch > 0 && epochs > 0)) return;
    const run = planner.runOf(n, batch, epochs);
    for (const name of ["rate", "steps"]) {
      field(name).value = run[name];
      slider(name).value = toSlider(name, run[name]);
      slider(name).setAttribute("aria-valuetext", field(name).value);
    }
    soon();
  }
  const unshape = (name) => { if (name === "rate" || name === "steps") for (const each of SHAPE) field(each).value = ""; };

  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(answer, 120); };
  for (const name of NAMES) {
    slider(name).addEventListener("input", () => {
      unshape(name);
      field(name).value = fromSlider(name, Number(slider(name).value));
      slider(name).setAttribute("aria-valuetext", field(name).value);
      soon();
    });
    field(name).addEventListener("input", () => {
      unshape(name);
      const value = Number(field(name).value);
      if (value > 0) slider(name).value = toSlider(name, value);
      slider(name).setAttribute("aria-valuetext", field(name).value);
      soon();
    });
    slider(name).value = toSlider(name, Number(field(name).value));
    slider(name).setAttribute("aria-valuetext", field(name).value);
  }
  for (const name of SHAPE) field(name).addEventListener("input", shape);
  form.addEventListener("submit", (event) => { event.preventDefault(); answer(); });
  element("calculator-copy").addEventListener("click", copy);
  form.hidden = false;
  answer();
})();
