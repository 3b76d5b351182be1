// What the exact filter promises, in a reader's browser: the method of dpcompanion.filters.game, which says why each bound
// holds.  Somebody chooses, before each block of steps and in the light of all outputs so far, to which level the example's
// gradients are clipped; a block at a level costs whole units of a budget.  With b units left and a loss of u less than the
// promised epsilon, the worst delta is V(b, u), and
//
//     V(0, u) = max(0, 1 - e^-u),   V(b, u) = max(V(b - 1, u), max over levels with cost c <= b of E[V(b - c, u + loss)]).
//
// It depends on epsilon only through u: one table holds the promises of all budgets.  The tests hold it against the library.
const exactFilter = (() => {
  "use strict";
  const parts = typeof require === "undefined" ? accountant.parts : require("./accountant.js").parts;
  const { LOG_OUTSIDE, fourier, stepOf, window_, convolved, prepared, spaced } = parts;

  // Norms are measured anew BLOCKS times in a run.  A budget has at most LARGEST_BUDGET units, a table LARGEST_TABLE places; a
  // promise of which more than LARGEST_ERROR may be the grid's doing, or of whose delta more than LARGEST_SLACK is a bound on
  // rounding errors, or above LARGEST_EPSILON, is not given.
  const LEVELS = [0.25, 0.5, 0.75, 1], BLOCKS = 32, LARGEST_BUDGET = 1024, LARGEST_TABLE = 1 << 13, LARGEST_ERROR = 0.1;
  const LARGEST_EPSILON = 20, TOLERANCE = 3e-3, WIDTH = 7, LARGEST_LAW = 1 << 16, UNIT = 2 ** -53, HEAVIEST = 250, HAIR = 3e-3,
    LARGEST_SLACK = 0.01;

  const REASON = `epsilon is beyond ${LARGEST_EPSILON}, or the grid that a page has time for is too coarse (tiny epsilons, very many steps)`;

  // Whole costs in proportion to the Rényi divergences of the levels where the example's own meets delta: no level is a bargain.
  // Its own is priced exactly; costs are as fine as they must be for rounding the others up to waste no more than a twentieth,
  // and no finer than the budget allows.
  function costsOf(prices, price, blocks) {
    let least = Infinity, found = null;
    for (let own = 1; own <= Math.max(1, Math.floor(LARGEST_BUDGET / blocks)); own++) {
      const exact = prices.map((each) => own * each / price), costs = exact.map((cost) => Math.ceil(cost * (1 - 1e-9)));
      const waste = Math.max(...costs.map((cost, i) => cost / exact[i])) - 1;
      if (waste < 0.9 * least) [least, found] = [waste, costs];
      if (waste <= 0.05) break;
    }
    return found;
  }

  // The tilt at which Chernoff's bound on the epsilon of a run is least.
  function saddle(rate, noise, steps, delta) {
    const { tilts, moments } = prepared(rate, noise, steps, delta, true);
    const at = tilts.map((tilt, i) => (moments[i] - Math.log(delta) - Math.log1p(tilt)) / tilt - Math.log1p(1 / tilt));
    return tilts[at.indexOf(Math.min(...at))];
  }

  // A block of steps at one level.  Full batches: one Gaussian of all of them.
  function blockOf(rate, noise, steps, removing, logCapped) {
    const [count, alone] = rate === 1 ? [1, noise / Math.sqrt(steps)] : [steps, noise];
    const step = stepOf(rate, alone, removing, logCapped - Math.log(count));
    return { count, step, logMass: (tilt) => count * step.logMoment(tilt) };
  }

  // The tilted law of a block's loss on the grid, from above: {first, masses, lost, blur}.  Several steps are composed on a finer
  // grid, whose points are then shared between those of the grid so that the masses under both distributions stay.
  function lawOf(block, grid, tilt) {
    const { step, count } = block;
    if (count === 1) {
      const one = step.discretised(grid, tilt), scale = Math.exp(one.logMass);
      return trimmed(one.first, one.masses.map((mass) => mass * scale), one.cut * scale, 0);
    }
    const [from, to] = window_(step, count, tilt, 0);
    const finer = Math.max(1, Math.min(Math.ceil(Math.sqrt(10 * count)), Math.floor(grid * (LARGEST_LAW - 4) / (to - from))));
    const fine = grid / finer, [low, high] = window_(step, count, tilt, fine);
    const one = step.discretised(fine, tilt), first = Math.floor(low / fine);
    const masses = convolved(one.first, one.masses, count, first, (high - low) / fine + 2);
    const scale = Math.exp(count * one.logMass), cells = new Map();
    const add = (cell, mass) => cells.set(cell, (cells.get(cell) || 0) + mass);
    masses.forEach((mass, i) => {
      const cell = Math.floor((first + i) / finer), above = (first + i - cell * finer) * fine;
      const upper = Math.min(1, Math.expm1(-above) / Math.expm1(-grid));
      if (upper < 1) add(cell, mass * (1 - upper) * Math.exp(-tilt * above));
      if (upper > 0) add(cell + 1, mass * upper * Math.exp(tilt * (grid - above)));
    });
    const places = [...cells.keys()], start = places.reduce((least, place) => Math.min(least, place));
    const law = new Float64Array(places.reduce((most, place) => Math.max(most, place)) - start + 1);
    for (const [place, mass] of cells) law[place - start] = mass * scale;
    // A power of the spectrum, whose modulus is at most 1, amplifies relative errors by the number of steps.
    const blur = scale * count * UNIT * (16 * Math.log2(masses.length) + 32) * Math.sqrt(2 * finer);
    return trimmed(start, law, (count * one.cut + 2 * Math.exp(LOG_OUTSIDE)) * scale, blur);
  }

  // Without the ends that hold next to nothing; what they hold is accounted for.
  function trimmed(first, masses, lost, blur) {
    const total = masses.reduce((sum, mass) => sum + mass, 0), limit = 1e-16 * total;
    let start = 0, end = masses.length, cut = 0;
    while (cut + masses[start] < limit) cut += masses[start++];
    lost += cut;
    cut = 0;
    while (cut + masses[end - 1] < limit) cut += masses[--end];
    return { first: first + start, masses: masses.slice(start, end), lost: lost + cut, blur, total };
  }

  // The promise of every budget in one direction, [epsilon of 0 units, of 1 unit, ...], and what the grid may have added to the
  // last; null where the grid would be too coarse.  A generator, which pauses now and then.
  function* directed(rate, noises, costs, budget, block, delta, removing) {
    const times = costs.map((cost) => Math.floor(budget / cost));
    const blocks = noises.map((noise, k) => blockOf(rate, noise, block, removing, Math.log(1e-5 * delta) - Math.log(times[k])));
    // A tilted V is at most exp(logChernoff) at budget 0, and grows no faster than the mass of a path: Chernoff's bound on the game,
    // `most`, and the tilt at which it is least.
    const logChernoff = (tilt) => tilt * Math.log(tilt) - (1 + tilt) * Math.log1p(tilt);
    const mass = (tilt) => budget * Math.max(0, ...blocks.map((each, k) => each.logMass(tilt) / costs[k]));
    let tilt = 0, most = Infinity;
    for (const each of spaced(1e-3, 1e4, 141)) {
      const heaviest = mass(each), bound = Math.max(0, (heaviest + logChernoff(each) - Math.log(delta)) / each);
      if (heaviest <= HEAVIEST && bound < most) [tilt, most] = [each, bound];
    }
    if (!(most < 2 * LARGEST_EPSILON)) return null;
    yield;

    let grid = Math.min(Math.sqrt(12 * TOLERANCE * Math.max(most, 1e-3 / tilt) / (Math.max(...times) * (1 + tilt))), 0.5 / tilt,
      (most + 0.01 / tilt) / 30, 0.1);
    let laws, low, high, left, right, points;
    for (;;) {
      laws = [];
      for (const each of blocks) {
        laws.push(lawOf(each, grid, tilt));
        yield;
      }
      left = Math.max(0, ...laws.map((law) => -law.first));
      right = Math.max(0, ...laws.map((law) => law.first + law.masses.length - 1));
      let spread = 0, drift = 0;
      laws.forEach(({ first, masses, total }, k) => {
        const mean = masses.reduce((sum, mass, i) => sum + mass * (first + i), 0) / total;
        const variance = masses.reduce((sum, mass, i) => sum + mass * (first + i - mean) ** 2, 0) / total;
        spread = Math.max(spread, Math.sqrt(times[k] * variance));
        drift = Math.max(drift, times[k] * mean);
      });
      // A bridge of `drift` with this spread is widest where drift (1 - t) - width spread sqrt(t (1 - t)) is least.
      const edge = Math.ceil((Math.hypot(drift, WIDTH * spread) - drift) / 2) + 16;
      const start = -Math.ceil(most / grid);
      low = start - Math.max(edge, left);
      high = Math.max(0, start + Math.ceil(drift)) + Math.max(edge, right);
      points = high - low + 1 + left + right;
      if (points <= LARGEST_TABLE) break;
      grid *= Math.max(1.1, 1.02 * points / LARGEST_TABLE);
      if (grid > 0.25) return null;
    }
    const error = 2 * Math.max(...laws.map((law, k) => times[k] * Math.max(0, Math.log(law.total) - blocks[k].logMass(tilt)))) / tilt;

    let length = 16;
    while (length < points) length *= 2;
    const size = high - low + 1, half = length / 2 + 1;
    const spectra = laws.map(({ first, masses }) => {
      const real = new Float64Array(length), imaginary = new Float64Array(length);
      masses.forEach((mass, i) => { real[((first + i) % length + length) % length] += mass; });
      fourier(real, imaginary, false);
      return [real, imaginary];
    });
    const norms = laws.map(({ masses }) => Math.sqrt(masses.reduce((sum, mass) => sum + mass * mass, 0)));
    // Transforms of relative error below 7 log2(length) units each (Higham 2002, theorem 24.2); two reals go through each.
    const rounding = norms.map((norm) => 42 * Math.log2(length) * UNIT * norm);
    const growth = Math.max(0, ...laws.map((law, k) => Math.log(law.total + law.lost) / costs[k]));
    const capped = Math.max(...costs.map((cost, k) => 1e-5 * delta / times[k] / cost));
    let now = Float64Array.from({ length: size }, (_, i) => {
      const u = (low + i) * grid;
      return u > 0 ? -Math.expm1(-u) * Math.exp(-tilt * u) : 0;
    });
    const ring = Math.max(...costs) + 1, history = [], promises = [0];
    // What rounding and cut-off tails may have taken, by units: along the plays of a path, none of an idle unit.
    const slacks = Array(ring).fill(0), sizes = Array(ring).fill(0);
    let slack = 0;
    for (let b = 0; b <= budget; b++) {
      if (b) {
        const playable = costs.map((_, k) => k).filter((k) => costs[k] <= b), next = now.slice();
        for (let pair = 0; pair < playable.length; pair += 2) {
          const two = playable.slice(pair, pair + 2), from = (k) => (b - costs[k]) % ring;
          const rounded = two.reduce((sum, k) => sum + rounding[k] * sizes[from(k)], 0);
          for (const k of two) {
            const taken = rounded + laws[k].blur * sizes[from(k)] + laws[k].lost * Math.exp(logChernoff(tilt) + growth * (b - costs[k]));
            slack = Math.max(slack, slacks[from(k)] * Math.exp(growth * costs[k]) + taken);
          }
          const [one, other] = correlated(two.map((k) => [history[from(k)], spectra[k]]), length);
          for (let i = 0; i < size; i++) {
            const larger = Math.max(one[i], other[i]);
            if (larger > next[i]) next[i] = larger;
          }
        }
        now = next;
        promises.push(promiseOf(b));
        if (b % 16 === 0) yield;
      }
      // Left of the window V keeps the value of its end; right of it, in e^-u, it is a chord of the convex function, up to 1.
      const real = new Float64Array(length), imaginary = new Float64Array(length);
      real.set(now);
      const end = high * grid, gap = Math.max(0, 1 - (now[size - 1] + slack) * Math.exp(tilt * end));
      for (let i = 1; i <= right; i++) real[size - 1 + i] = Math.exp(-tilt * (end + i * grid)) * (1 - gap * Math.exp(-i * grid));
      const ceiling = Math.exp(logChernoff(tilt) + growth * b);
      for (let i = 1; i <= left; i++) real[length - i] = Math.min((now[0] + slack) * Math.exp(tilt * i * grid), ceiling);
      [slacks[b % ring], sizes[b % ring]] = [slack, Math.sqrt(real.reduce((sum, value) => sum + value * value, 0)) + slack * Math.sqrt(size)];
      fourier(real, imaginary, false);
      history[b % ring] = [real.slice(0, half), imaginary.slice(0, half)];
    }
    return slack > LARGEST_SLACK * now[-low - Math.floor(promises[budget] / grid)] ? null : { promises, error };

    // The least epsilon at which b units keep delta: between two points of the grid V is at most its chord in e^-u.
    function promiseOf(b) {
      const value = (i) => {
        const u = (low + i) * grid;
        return Math.exp(tilt * u) * (now[i] + slack) * (1 + 1e-12 + 1e-14 * b) + b * capped;
      };
      if (value(0) > delta) return Infinity;
      if (value(-low) <= delta) return 0;
      let below = 0, above = -low;
      while (above - below > 1) {
        const middle = (below + above) >> 1;
        if (value(middle) <= delta) below = middle; else above = middle;
      }
      const [here, there] = [value(below), value(above)], share = (delta - here) / (there - here);
      return -(low + below) * grid + Math.log1p(share * Math.expm1(-grid));
    }
  }

  // E[V(u + loss)] at all u for one or two levels: two real correlations by one complex transform.
  function correlated(pairs, length) {
    const real = new Float64Array(length), imaginary = new Float64Array(length);
    pairs.forEach(([[a, b], [c, d]], which) => {
      for (let i = 0; i <= length / 2; i++) {
        const x = a[i] * c[i] + b[i] * d[i], y = b[i] * c[i] - a[i] * d[i], mirror = (length - i) % length;
        // The spectrum of a real sequence at -i is the conjugate of that at i; the second sequence is multiplied by sqrt(-1).
        if (which === 0) { real[i] += x; imaginary[i] += y; } else { real[i] -= y; imaginary[i] += x; }
        if (mirror === i) continue;
        if (which === 0) { real[mirror] += x; imaginary[mirror] -= y; } else { real[mirror] += y; imaginary[mirror] += x; }
      }
    });
    fourier(real, imaginary, true);
    return [real, imaginary];
  }

  // The filter of a run, as a generator that pauses now and then and returns {levels, costs, level, block, blocks, budget, promises,
  // error}: `budget` pays for all steps of somebody whose norm is `norm` times the clip norm, rounded up to `level`, and
  // `promises[i]`, an epsilon never below the truth, is kept at delta by what pays for i blocks of them, whatever the norms.
  // Where there is no bound worth showing it returns {reason}.
  function* promised(rate, noise, steps, delta, norm) {
    const block = Math.ceil(steps / BLOCKS), blocks = Math.ceil(steps / block);
    const level = LEVELS.find((each) => norm <= each);
    const tilt = saddle(rate, noise / level, blocks * block, delta);
    // Of divergences next to nothing only rounding errors are left, of either sign.
    const priceOf = (each) => Math.max(1e-14, blockOf(rate, noise / each, block, true, Math.log(1e-5 * delta / blocks)).logMass(tilt));
    // A level of which the budget does not pay for a block cannot be played.
    const price = priceOf(level), levels = LEVELS.filter((each) => priceOf(each) <= price * blocks);
    const costs = costsOf(levels.map(priceOf), price, blocks), budget = costs[levels.indexOf(level)] * blocks;
    yield;
    const found = [];
    for (const removing of rate === 1 ? [true] : [true, false]) {
      const answer = yield* directed(rate, levels.map((each) => noise / each), costs, budget, block, delta, removing);
      if (!answer) return { reason: REASON };
      found.push(answer);
    }
    const promises = Array.from({ length: blocks + 1 }, (_, i) => (1 + HAIR) * Math.max(...found.map((each) => each.promises[i * budget / blocks])));
    const error = Math.max(...found.map((each) => each.error)) + HAIR * promises[blocks];
    if (!(promises[blocks] <= LARGEST_EPSILON && error <= LARGEST_ERROR * promises[blocks])) return { reason: REASON };
    return { levels, costs, level, block, blocks, budget, promises, error };
  }

  // To the end at once.
  function finished(generator) {
    for (;;) {
      const { value, done } = generator.next();
      if (done) return value;
    }
  }

  return { promised, finished };
})();

if (typeof module !== "undefined") module.exports = exactFilter;
