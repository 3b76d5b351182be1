// The calculator page: reads the form, asks `accountant`, writes the answers.  Plain HTML controls, so that keyboards and
// screen readers know what to do with them.
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

  function answer() {
    const value = Object.fromEntries(NAMES.map((name) => [name, Number(field(name).value)]));
    const wrong = NAMES.find((name) => !(value[name] >= Number(field(name).min) && value[name] <= Number(field(name).max))
      || (name === "steps" && !Number.isInteger(value[name])));
    for (const name of NAMES) field(name).setAttribute("aria-invalid", String(name === wrong));
    const said = document.getElementById("calculator-said");
    if (wrong) {
      said.textContent = `${field(wrong).labels[0].textContent} must lie between ${field(wrong).min} and ${field(wrong).max}`
        + (wrong === "steps" ? ", a whole number." : ".");
      return;
    }
    const write = (id, text) => { document.getElementById(id).textContent = text; };
    const found = { all: value.noise, one: value.noise / value.norm };
    const epsilon = {};
    for (const [who, noise] of Object.entries(found)) {
      const byRenyi = accountant.epsilonByRenyi(value.rate, noise, value.steps, value.delta);
      const byLosses = accountant.epsilonByLosses(value.rate, noise, value.steps, value.delta);
      epsilon[who] = Math.min(...[byRenyi, byLosses.epsilon].filter(Number.isFinite));
      write(`${who}-rdp`, shown(byRenyi));
      write(`${who}-pld`, shown(byLosses.epsilon));
      write(`${who}-error`, Number.isFinite(byLosses.error) ? atMost(byLosses.error) : "large");
    }
    said.textContent = `For everybody, epsilon is at most ${shown(epsilon.all)}. For somebody whose gradients are never longer than `
      + `${value.norm} of the clip norm, it is at most ${shown(epsilon.one)}.`;
    write("calculator-python", `from dpcompanion.accounting import compute_epsilon\n`
      + `compute_epsilon(sample_rate=${value.rate}, noise_multiplier=${value.noise}, steps=${value.steps}, delta=${value.delta})\n`
      + `compute_epsilon(sample_rate=${value.rate}, noise_multiplier=${value.noise} / ${value.norm}, steps=${value.steps}, delta=${value.delta})`);
  }

  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(answer, 120); };
  for (const name of NAMES) {
    slider(name).addEventListener("input", () => {
      field(name).value = fromSlider(name, Number(slider(name).value));
      slider(name).setAttribute("aria-valuetext", field(name).value);
      soon();
    });
    field(name).addEventListener("input", () => {
      const value = Number(field(name).value);
      if (value > 0) slider(name).value = toSlider(name, value);
      slider(name).setAttribute("aria-valuetext", field(name).value);
      soon();
    });
    slider(name).value = toSlider(name, Number(field(name).value));
    slider(name).setAttribute("aria-valuetext", field(name).value);
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); answer(); });
  form.hidden = false;
  answer();
})();
