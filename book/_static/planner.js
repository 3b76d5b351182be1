// The planner of the page "Choose an epsilon": from examples, batch, epochs and a tolerable attacker to noise and epsilon.
// Needs `accountant`; the tests hold its answers against the library (tests/test_planner.py).
const planner = (() => {
  "use strict";
  const account = typeof require === "undefined" ? accountant : require("./accountant.js");
  const LEAST = 0.3, MOST = 1000, FINE = 1.004, NUDGE = 1.0015, GRID = 1 << 14, FALSE = 0.001;

  // The rate and steps of a plan; steps are rounded up, so that no epoch is paid for by a fraction of one.
  function runOf(n, batch, epochs) {
    return { rate: batch / n, steps: Math.max(1, Math.ceil(epochs * n / batch * (1 - 1e-12))) };
  }

  // What an attacker may achieve, as a quantity that falls with noise.  "odds" and "epsilon" are about epsilon by PLD.
  const MEASURES = {
    epsilon: (rate, noise, steps, delta) => account.epsilonByLosses(rate, noise, steps, delta, GRID).epsilon,
    odds: (rate, noise, steps, delta) => Math.exp(MEASURES.epsilon(rate, noise, steps, delta)),
    found: (rate, noise, steps) => account.attackerOf(rate, noise, steps)(FALSE),
    advantage: (rate, noise, steps) => account.profileOf(rate, noise, steps)[0][1],
  };

  // The least value that a limit may have: an attacker who guesses reaches it.
  const GUESSING = { epsilon: 0, odds: 1, found: FALSE, advantage: 0 };

  // Three digits, rounded up: noise that is a little more than enough.
  const up = (value) => {
    const unit = Math.pow(10, Math.floor(Math.log10(value)) - 2);
    return Number((Math.ceil(value / unit * (1 - 1e-12)) * unit).toPrecision(3));
  };

  // The least noise multiplier, to half a percent and from above, at which a measure is at most its limit; a generator, which
  // pauses after each attempt.  NaN if no noise up to MOST is enough.  Measures, less what guessing reaches, are nearly powers
  // of the noise: a straight line between the logarithms says where the limit is met, and both sides of that place are tried.
  function* noiseFor({ rate, steps, delta, measure, limit }) {
    const base = GUESSING[measure], goal = Math.log(limit - base);
    if (!(limit > base)) return NaN;
    const excess = (noise) => Math.log(Math.max(MEASURES[measure](rate, noise, steps, delta) - base, 1e-300));
    let low = 1, high = 1, atLow = excess(1), atHigh = atLow;
    while (atHigh > goal) {
      yield high;
      if (high >= MOST) return NaN;
      [low, atLow, high] = [high, atHigh, Math.min(MOST, 2 * high)];
      atHigh = excess(high);
    }
    while (atLow <= goal) {
      yield low;
      if (low <= LEAST) return LEAST;
      [high, atHigh, low] = [low, atLow, Math.max(LEAST, low / 2)];
      atLow = excess(low);
    }
    for (let i = 1; high > FINE * low; i++) {
      yield high;
      const share = i % 6 && atLow < 700 && atHigh > -600 ? (atLow - goal) / (atLow - atHigh) : 0.5;
      const near = low * Math.pow(high / low, share) * (i % 2 ? NUDGE : 1 / NUDGE);
      const noise = Math.min(high / 1.0005, Math.max(low * 1.0005, near)), found = excess(noise);
      if (found <= goal) [high, atHigh] = [noise, found]; else [low, atLow] = [noise, found];
    }
    return up(high);
  }

  function finished(working) {
    for (;;) {
      const { value, done } = working.next();
      if (done) return value;
    }
  }

  // All that the page says of a run.
  function outcome({ rate, steps, delta, noise }) {
    const epsilon = account.epsilonByLosses(rate, noise, steps, delta).epsilon;
    const profile = account.profileOf(rate, noise, steps);
    return { epsilon, byRenyi: account.epsilonByRenyi(rate, noise, steps, delta), odds: Math.exp(epsilon),
      found: account.attackerOf(rate, noise, steps)(FALSE), advantage: profile[0][1] };
  }

  // The last digit is rounded up: each of these is a bound.
  const shown = (value, digits = 3) => {
    if (!Number.isFinite(value)) return "no bound";
    if (value === 0) return "0";
    const unit = Math.pow(10, Math.floor(Math.log10(value)) - digits + 1);
    return String(Number((Math.ceil(value / unit * (1 - 1e-9)) * unit).toPrecision(digits)));
  };

  // The power of ten at or below a tenth of 1/n, until the reader has a delta.
  const deltaFor = (n) => Number(`1e${-Math.ceil(Math.log10(10 * n) - 1e-9)}`);

  const UNITS = { row: ["one row", "rows"], person: ["one person, with all rows of that person", "people"] };

  // Made-up data stand where the reader's belong, so that the program runs as it is shown.
  const DATA = {
    row: (n) => ["DPSGDPlan, cross_entropy, train", `data = torch.randn(${n}, 20), torch.randint(2, (${n},))`],
    person: (n) => ["DPSGDPlan, by_person, cross_entropy, train", `rows = 2 * ${n}
x, y = torch.randn(rows, 20), torch.randint(2, (rows,))
people = torch.arange(rows) % ${n}
data = by_person(x, y, people, at_most=10)  # at most ten rows a step`],
  };

  const code = ({ n, batch, steps, delta, noise, unit }) => `import torch
from dpcompanion.training import ${DATA[unit](n)[0]}

# Put your data and your model here.
${DATA[unit](n)[1]}
model = torch.nn.Linear(20, 2)
parameters = sum(p.numel() for p in model.parameters())

plan = DPSGDPlan(
    n=${n}, sample_rate=${batch} / ${n}, steps=${steps}, unit="${unit}",
    max_grad_norm=1.0, noise_multiplier=${noise}, delta=${delta},
    arithmetic="float", parameters=parameters)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = train(model, cross_entropy, data, plan, optimizer=optimizer)
print(history.statement())`;

  const paragraph = ({ n, batch, steps, delta, noise, unit, epsilon }) => `The model was trained by DP-SGD with a uniform `
    + `(${shown(epsilon)}, ${delta})-differential privacy guarantee. Neighbouring data sets differ in ${UNITS[unit][0]}, whose clipped `
    + `gradient is zero in one of them (zero-out); the number of ${UNITS[unit][1]}, ${n}, is public. Batches are Poisson samples at a `
    + `rate of ${batch}/${n}; there are ${steps} steps with a noise multiplier of ${noise}. Epsilon is computed from privacy loss `
    + `distributions (PLD) for exact arithmetic, and covers all intermediate models. It does not cover hyperparameters that were `
    + `chosen on the same data.`;

  return { runOf, deltaFor, noiseFor, finished, outcome, shown, code, paragraph, MEASURES, GUESSING };
})();

if (typeof module !== "undefined") module.exports = planner;

// The form.
(() => {
  "use strict";
  const form = typeof document === "undefined" ? null : document.getElementById("planner");
  if (!form) return;
  const element = (id) => document.getElementById(id), field = (name) => form.elements[name];
  const NAMES = ["n", "batch", "epochs", "delta", "limit"], RESULTS = ["noise", "epsilon", "renyi", "advantage", "found", "odds"];
  const LIMITS = { found: ["1", "True positives at 0.1% false positives, at most, in percent", 100], advantage: ["10", "Advantage at most, in percent", 100],
    odds: ["20", "Odds multiplied by at most", 1], epsilon: ["3", "Epsilon at most", 1] };
  const percent = (value) => (value >= 0.9995 ? "100%" : `${planner.shown(100 * value, 2)}%`);
  let working = 0;

  function clear(said) {
    working++;
    for (const name of RESULTS) element(`plan-${name}`).textContent = "\u2013";
    for (const id of ["plan-code", "plan-paragraph"]) element(id).textContent = "";
    element("planner-said").textContent = said;
  }

  function label() {
    const person = field("unit").value === "person";
    element("plan-n-label").textContent = person ? "People" : "Rows";
    element("plan-batch-label").textContent = person ? "People in a batch, on average" : "Rows in a batch, on average";
  }

  function answer() {
    const value = Object.fromEntries(NAMES.map((name) => [name, Number(field(name).value)]));
    const { rate, steps } = planner.runOf(value.n, value.batch, value.epochs);
    const measure = field("measure").value, limit = value.limit / LIMITS[measure][2];
    const outside = NAMES.find((name) => !(value[name] >= Number(field(name).min) && value[name] <= Number(field(name).max)));
    const wrong = outside || (!Number.isInteger(value.n) ? "n" : rate > 1 || rate < 1e-5 ? "batch" : steps > 1e6 ? "epochs"
      : value.delta * value.n >= 1 ? "delta" : limit > planner.GUESSING[measure] ? null : "limit");
    for (const name of NAMES) field(name).setAttribute("aria-invalid", String(name === wrong));
    if (wrong) {
      const why = { n: "must be a whole number from 2 to a hundred million", batch: "must lie between n/100,000 and n",
        epochs: "must give at most a million steps", delta: "must be positive and below 1/n",
        limit: "must be more than an attacker reaches by guessing, and at most the largest value of the field" };
      return clear(`${field(wrong).labels[0].textContent} ${why[wrong]}.`);
    }
    clear("Searching for the least noise ...");
    const mine = working, run = { rate, steps, delta: value.delta };
    const search = planner.noiseFor({ ...run, measure, limit });
    const next = () => {
      if (mine !== working) return undefined;
      const { value: noise, done } = search.next();
      return done ? show(noise) : setTimeout(next, 0);
    };
    const show = (noise) => {
      if (Number.isNaN(noise)) return clear("No noise multiplier up to 1000 is enough: allow the attacker more, or train for fewer epochs.");
      const found = planner.outcome({ ...run, noise });
      const plan = { ...value, steps, noise, unit: field("unit").value, epsilon: found.epsilon };
      const text = { noise: String(noise), epsilon: planner.shown(found.epsilon), renyi: planner.shown(found.byRenyi),
        advantage: percent(found.advantage), found: percent(found.found), odds: planner.shown(found.odds) };
      for (const name of RESULTS) element(`plan-${name}`).textContent = text[name];
      element("plan-code").textContent = planner.code(plan);
      element("plan-paragraph").textContent = planner.paragraph(plan);
      element("planner-said").textContent = `Noise multiplier ${noise}: epsilon is at most ${text.epsilon} at delta ${value.delta}, in ${steps} steps.`;
      return undefined;
    };
    return setTimeout(next, 0);
  }

  let waiting = 0, typed = false;
  const follow = () => {
    const n = Number(field("n").value);
    if (!typed && n >= 2) field("delta").value = String(planner.deltaFor(n));
  };
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(answer, 250); };
  field("delta").addEventListener("input", () => { typed = true; });
  field("n").addEventListener("input", follow);
  for (const name of NAMES) field(name).addEventListener("input", soon);
  field("unit").addEventListener("change", () => { label(); soon(); });
  field("measure").addEventListener("change", () => {
    [field("limit").value, element("plan-limit-label").textContent] = LIMITS[field("measure").value];
    soon();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); answer(); });
  form.hidden = false;
  label();
  follow();
  answer();
})();
