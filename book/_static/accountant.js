// What a run of DP-SGD costs, in a reader's browser: the sampled Gaussian mechanism, add or remove one example, Poisson
// sampling.  By Renyi divergences at whole orders, and by privacy loss distributions on a grid.  The tests hold every
// function against the library (tests/test_calculator.py).
const accountant = (() => {
  "use strict";

  const ORDERS = [];
  for (let order = 2; order < 64; order++) ORDERS.push(order);
  for (let order = 64; order <= 1024; order = Math.ceil(order * 1.09)) ORDERS.push(order);

  function logSumExp(values) {
    const top = Math.max(...values);
    return top + Math.log(values.reduce((sum, value) => sum + Math.exp(value - top), 0));
  }

  // Renyi divergence of one step at a whole order: ln sum_k C(a,k) (1-q)^(a-k) q^k exp((k^2-k) / 2 sigma^2), over a - 1.
  function renyi(rate, noise, order) {
    if (rate === 1) return order / (2 * noise * noise);
    const terms = [];
    let binomial = 0;
    for (let k = 0; k <= order; k++) {
      terms.push(binomial + (order - k) * Math.log1p(-rate) + k * Math.log(rate) + (k * k - k) / (2 * noise * noise));
      binomial += Math.log((order - k) / (k + 1));
    }
    return Math.max(0, logSumExp(terms)) / (order - 1);
  }

  // The conversion of Balle et al. 2020 and Canonne et al. 2020, at the best order.
  function epsilonByRenyi(rate, noise, steps, delta) {
    const found = ORDERS.map((order) => steps * renyi(rate, noise, order) + Math.log1p(-1 / order)
      - (Math.log(delta) + Math.log(order)) / (order - 1));
    return Math.max(0, Math.min(...found));
  }

  // P(N(0, 1) > x), with full relative accuracy in the tail.
  function upperTail(x) {
    if (x < 0) return 1 - upperTail(-x);
    const density = Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI);
    if (x < 3) {
      let term = x, sum = x;
      for (let n = 1; term > 1e-17 * sum; n++) { term *= x * x / (2 * n + 1); sum += term; }
      return 0.5 - density * sum;
    }
    let fraction = x;
    for (let n = 60; n > 0; n--) fraction = x + n / fraction;
    return density / fraction;
  }

  // P(low < N(0, 1) < high)
  function between(low, high) {
    if (low >= 0) return Math.max(0, upperTail(low) - upperTail(high));
    if (high <= 0) return Math.max(0, upperTail(-high) - upperTail(-low));
    return 1 - upperTail(-low) - upperTail(high);
  }

  // In place; the length is a power of two.
  function fourier(real, imaginary, inverse) {
    const size = real.length;
    for (let i = 1, j = 0; i < size; i++) {
      let bit = size >> 1;
      for (; j & bit; bit >>= 1) j ^= bit;
      j ^= bit;
      if (i < j) {
        [real[i], real[j]] = [real[j], real[i]];
        [imaginary[i], imaginary[j]] = [imaginary[j], imaginary[i]];
      }
    }
    const cosine = new Float64Array(size / 2), sine = new Float64Array(size / 2);
    for (let i = 0; i < size / 2; i++) {
      cosine[i] = Math.cos(2 * Math.PI * i / size);
      sine[i] = (inverse ? 1 : -1) * Math.sin(2 * Math.PI * i / size);
    }
    for (let length = 2; length <= size; length <<= 1) {
      const half = length / 2, stride = size / length;
      for (let start = 0; start < size; start += length) {
        for (let k = 0; k < half; k++) {
          const a = start + k, b = a + half, c = cosine[k * stride], s = sine[k * stride];
          const x = real[b] * c - imaginary[b] * s, y = real[b] * s + imaginary[b] * c;
          real[b] = real[a] - x; imaginary[b] = imaginary[a] - y;
          real[a] += x; imaginary[a] += y;
        }
      }
    }
    if (inverse) for (let i = 0; i < size; i++) { real[i] /= size; imaginary[i] /= size; }
  }

  // An interval that the sum of the losses of all steps leaves with probability `spare` at most on either side (Chernoff).
  function range(rate, noise, steps, spare, removing) {
    const count = 2400, reach = 12 * noise + 1, width = (2 * reach + 1) / count;
    const loss = [], weight = [];
    for (let i = 0; i < count; i++) {
      const x = (i + 0.5) * width - reach;
      const ratio = Math.log1p(rate * Math.expm1((2 * x - 1) / (2 * noise * noise)));
      loss.push(removing ? ratio : -ratio);
      weight.push(-x * x / (2 * noise * noise) + (removing ? ratio : 0) + Math.log(width / (noise * Math.sqrt(2 * Math.PI))));
    }
    let low = -Infinity, high = Infinity;
    for (let tilt = 0.1; tilt < 5000; tilt *= 1.25) {
      const up = logSumExp(weight.map((value, i) => value + tilt * loss[i]));
      const down = logSumExp(weight.map((value, i) => value - tilt * loss[i]));
      high = Math.min(high, (steps * up - Math.log(spare)) / tilt);
      low = Math.max(low, -(steps * down - Math.log(spare)) / tilt);
    }
    return [Math.min(low, -1e-6), Math.max(high, 1e-6)];
  }

  // Epsilon in one direction.  The loss of a step lies on a grid; the mass of a cell is split between its ends so that the
  // probabilities under both distributions stay ("connecting the dots"), which is an upper bound.
  function directedEpsilon(rate, noise, steps, delta, size, removing) {
    const spare = 1e-6 * delta;
    const [low, high] = range(rate, noise, steps, spare, removing);
    const grid = (high - low) / size;
    const real = new Float64Array(size), imaginary = new Float64Array(size);
    const place = (cell, mass) => { real[((cell % size) + size) % size] += mass; };
    // ln(dP/dQ) grows with x; `edge` is the x at which it takes a value.
    const edge = (loss) => {
      const inside = (Math.expm1(loss) + rate) / rate;
      return inside > 0 ? noise * noise * Math.log(inside) + 0.5 : -Infinity;
    };
    const reach = 40 * noise + 1;
    const bottom = Math.log1p(rate * Math.expm1((-2 * reach - 1) / (2 * noise * noise)));
    const top = Math.min(high, Math.log1p(rate * Math.expm1(Math.min(700, (2 * reach - 1) / (2 * noise * noise)))));
    const without = (a, b) => between(a / noise, b / noise);
    const withIt = (a, b) => (1 - rate) * without(a, b) + rate * between((a - 1) / noise, (b - 1) / noise);
    let infinite = 0;
    if (removing) {
      const first = Math.floor(bottom / grid), last = Math.ceil(top / grid);
      for (let cell = first; cell < last; cell++) {
        const a = cell === first ? -Infinity : edge(cell * grid), b = edge((cell + 1) * grid);
        const mass = withIt(a, b), other = without(a, b);
        const up = Math.min(mass, Math.max(0, (mass - other * Math.exp(cell * grid)) / -Math.expm1(-grid)));
        place(cell, mass - up);
        place(cell + 1, up);
      }
      infinite = withIt(edge(last * grid), Infinity);
    } else {
      // The loss is -ln(dP/dQ) under Q, never above -ln(1 - q).
      const first = Math.floor(-top / grid), last = Math.ceil(-bottom / grid);
      for (let cell = first; cell < last; cell++) {
        const a = cell === last - 1 ? -Infinity : edge(-(cell + 1) * grid), b = cell === first ? Infinity : edge(-cell * grid);
        const mass = without(a, b), other = withIt(a, b);
        const up = Math.min(mass, Math.max(0, (mass - other * Math.exp(cell * grid)) / -Math.expm1(-grid)));
        place(cell, mass - up);
        place(cell + 1, up);
      }
    }
    fourier(real, imaginary, false);
    for (let i = 0; i < size; i++) {
      const length = Math.pow(Math.hypot(real[i], imaginary[i]), steps), angle = steps * Math.atan2(imaginary[i], real[i]);
      real[i] = length * Math.cos(angle);
      imaginary[i] = length * Math.sin(angle);
    }
    fourier(real, imaginary, true);
    // delta(epsilon) is the sum of mass (1 - e^(epsilon - loss)) above epsilon: add from the top until it is too large.
    const target = delta - 2 * spare + Math.expm1(steps * Math.log1p(-Math.min(infinite, 0.5)));
    if (target <= 0) return Infinity;
    const ceiling = Math.floor(high / grid);
    let mass = 0, shrunk = 0;
    for (let cell = ceiling; cell >= 0; cell--) {
      const loss = cell * grid;
      if (mass - Math.exp(loss) * shrunk > target) return Math.min(loss + grid, Math.log((mass - target) / shrunk));
      const here = real[cell % size];
      mass += here;
      shrunk += here * Math.exp(-loss);
    }
    return 0;
  }

  // {epsilon, error}: an upper bound on a grid, and how much a grid of half as many points adds; a finer grid where that is
  // more than half a percent.
  function epsilonByLosses(rate, noise, steps, delta) {
    const at = (size) => Math.max(directedEpsilon(rate, noise, steps, delta, size, true),
      directedEpsilon(rate, noise, steps, delta, size, false));
    let [coarse, epsilon] = [at(16384), at(32768)];
    if (!(coarse - epsilon <= 0.005 * epsilon)) [coarse, epsilon] = [at(65536), at(131072)];
    return { epsilon, error: Math.abs(coarse - epsilon) };
  }

  return { ORDERS, renyi, epsilonByRenyi, epsilonByLosses, upperTail };
})();

if (typeof module !== "undefined") module.exports = accountant;
