// What a run of DP-SGD costs, in a reader's browser: the sampled Gaussian mechanism, add or remove one example, Poisson
// sampling.  By Rényi divergences at whole orders, and by privacy loss distributions on a grid.  The tests hold every
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

  // Rényi divergence of one step at a whole order: ln(1 + sum_k C(a,k) (1-q)^(a-k) q^k (exp((k^2-k) / 2 sigma^2) - 1)) over
  // a - 1, of positive terms only: nothing cancels, and a tiny divergence is not taken for none.
  function renyi(rate, noise, order) {
    if (rate === 1) return order / (2 * noise * noise);
    const terms = [];
    let binomial = Math.log(order);
    for (let k = 2; k <= order; k++) {
      binomial += Math.log((order - k + 1) / k);
      const power = (k * k - k) / (2 * noise * noise);
      const excess = power > 1 ? power + Math.log1p(-Math.exp(-power)) : Math.log(Math.expm1(power));
      terms.push(binomial + (order - k) * Math.log1p(-rate) + k * Math.log(rate) + excess);
    }
    const total = logSumExp(terms);
    return (1 + 1e-11) * (total > 30 ? total + Math.exp(-total) : Math.log1p(Math.exp(total))) / (order - 1);
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

  // P(N(0, 1) > x) over the density at x.
  function mills(x) {
    if (x < 3) return upperTail(x) * Math.sqrt(2 * Math.PI) * Math.exp(x * x / 2);
    let fraction = x;
    for (let n = 60; n > 0; n--) fraction = x + n / fraction;
    return 1 / fraction;
  }

  function logUpperTail(x) {
    return x < 3 ? Math.log(upperTail(x)) : Math.log(mills(x)) - x * x / 2 - 0.5 * Math.log(2 * Math.PI);
  }

  // The Gaussian mechanism, exactly (Balle and Wang 2018): what full batches are.
  function gaussianDelta(mu, epsilon) {
    const a = epsilon / mu - mu / 2;
    return upperTail(a) - Math.exp(-a * a / 2) / Math.sqrt(2 * Math.PI) * mills(epsilon / mu + mu / 2);
  }

  function gaussianEpsilon(mu, delta) {
    const within = (epsilon) => gaussianDelta(mu, epsilon) <= delta;
    if (within(0)) return 0;
    return bisected(within, 0, mu * mu / 2 + mu * Math.sqrt(-2 * Math.log(delta)));
  }

  // Where `holds` begins to hold, between a point where it does not and one where it does, from above.
  function bisected(holds, low, high) {
    for (let i = 0; i < 100; i++) {
      const middle = (low + high) / 2;
      if (holds(middle)) high = middle; else low = middle;
    }
    return high;
  }

  const tables = new Map();
  function waves(size) {
    if (!tables.has(size)) {
      tables.set(size, {
        cosine: Float64Array.from({ length: size / 2 }, (_, i) => Math.cos(2 * Math.PI * i / size)),
        sine: Float64Array.from({ length: size / 2 }, (_, i) => Math.sin(2 * Math.PI * i / size)),
      });
    }
    return tables.get(size);
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
    const { cosine, sine } = waves(size), sign = inverse ? 1 : -1;
    for (let length = 2; length <= size; length <<= 1) {
      const half = length / 2, stride = size / length;
      for (let start = 0; start < size; start += length) {
        for (let k = 0; k < half; k++) {
          const a = start + k, b = a + half, c = cosine[k * stride], s = sign * sine[k * stride];
          const x = real[b] * c - imaginary[b] * s, y = real[b] * s + imaginary[b] * c;
          real[b] = real[a] - x; imaginary[b] = imaginary[a] - y;
          real[a] += x; imaginary[a] += y;
        }
      }
    }
    if (inverse) for (let i = 0; i < size; i++) { real[i] /= size; imaginary[i] /= size; }
  }

  // From here on the method of dpcompanion.accounting.pld, which says why each bound holds.  The loss of a step is capped where
  // it hardly ever lies (what is beyond counts as delta), put on a grid so that the masses under both distributions stay
  // ("connecting the dots"), tilted so that the bulk of what is transformed lies at the epsilon that is asked for (rounding
  // errors are relative to delta then, not to 1), and raised to the power of the steps within a window that Chernoff's
  // bound gives for the tilted law.
  const LOG_NEGLIGIBLE = -75, LOG_OUTSIDE = -38, LARGEST_GRID = 1 << 17, TAIL = 13, TOLERANCE = 5e-5, STEEPEST = 6;
  const TRANSFORM = 1e-14;  // what rounding in a transform may move of the tilted mass, for each step
  const FOUR = [[-0.8611363115940526, 0.34785484513745385], [-0.33998104358485626, 0.6521451548625462],
    [0.33998104358485626, 0.6521451548625462], [0.8611363115940526, 0.34785484513745385]];
  const SIX = [[-0.932469514203152, 0.17132449237917036], [-0.6612093864662645, 0.36076157304813866],
    [-0.23861918608319693, 0.467913934572691], [0.23861918608319693, 0.467913934572691],
    [0.6612093864662645, 0.36076157304813866], [0.932469514203152, 0.17132449237917036]];

  const spaced = (low, high, count) => Array.from({ length: count }, (_, i) => low * Math.pow(high / low, i / (count - 1)));

  // The loss of one step in one direction, over t = x / sigma.
  function stepOf(rate, noise, removing, logCapped) {
    const at = (t) => {
      const u = t / noise - 0.5 / (noise * noise);
      const ratio = u < 30 ? Math.log1p(rate * Math.expm1(u))
        : u + Math.log(rate) + Math.log1p((1 - rate) / rate * Math.exp(-u));
      const density = -0.5 * t * t - 0.5 * Math.log(2 * Math.PI);
      return removing ? [ratio, density + ratio] : [-ratio, density];
    };
    const inverse = (loss) => {
      const ratio = removing ? loss : -loss;
      const u = ratio < 30 ? Math.log1p(Math.max(-1, Math.expm1(ratio) / rate))
        : ratio - Math.log(rate) + Math.log1p(-(1 - rate) * Math.exp(-ratio));
      return noise * u + 0.5 / noise;
    };
    const logTail = (t) => (removing ? logSumExp([logUpperTail(t) + Math.log1p(-rate), logUpperTail(t - 1 / noise) + Math.log(rate)])
      : logUpperTail(t));
    const cap = bisected((t) => logTail(t) <= logCapped, 0, 50 + 1 / noise);
    const [start, end] = removing ? [-TAIL, cap] : [TAIL, -cap];
    const scale = 1 / (8 * noise * noise) + Math.log(rate) > -LOG_NEGLIGIBLE ? 1 : Math.min(1, 2 * noise);
    const panels = Math.ceil(Math.abs(end - start) / (0.5 * scale)), width = (end - start) / panels;
    const t = [], loss = [], logWeight = [];
    for (let panel = 0; panel < panels; panel++) {
      for (const [node, weight] of SIX) {
        const place = start + width * (panel + (node + 1) / 2), [value, density] = at(place);
        t.push(place);
        loss.push(value);
        logWeight.push(density + Math.log(Math.abs(width) / 2 * weight));
      }
    }
    const count = t.length;
    const tilted = (tilt) => {
      const exponents = loss.map((value, i) => logWeight[i] + tilt * value);
      return [exponents, logSumExp(exponents)];
    };
    const variance = (tilt) => {
      const [exponents, scaled] = tilted(tilt), weights = exponents.map((value) => Math.exp(value - scaled));
      const mean = weights.reduce((sum, weight, i) => sum + weight * loss[i], 0);
      return weights.reduce((sum, weight, i) => sum + weight * (loss[i] - mean) ** 2, 0);
    };
    // ln E[exp(tilt L)]; infinite where the nodes do not resolve the tilted law.
    const logMoment = (tilt) => {
      const [exponents, scaled] = tilted(tilt);
      const cut = exponents[0] - Math.max(...exponents) > LOG_NEGLIGIBLE;
      return cut || tilt * (loss[count - 1] - loss[count - 2]) > STEEPEST ? Infinity : scaled;
    };
    // Masses of the tilted law on the grid, that sum to 1; the logarithm of their sum before; what was cut at most.
    const discretised = (grid, tilt) => {
      const [exponents, scaled] = tilted(tilt);
      const kept = [...exponents.keys()].filter((i) => exponents[i] - scaled > LOG_NEGLIGIBLE);
      const before = kept[0] - 1, after = kept[kept.length - 1] + 1;
      const ends = [before >= 0 ? t[before] : start, after < count ? t[after] : end];
      const low = Math.min(...ends), high = Math.max(...ends), losses = ends.map((place) => at(place)[0]);
      const first = Math.floor(Math.min(...losses) / grid);
      const last = Math.max(Math.ceil(Math.max(...losses) / grid), first + 1);
      const pieces = Math.ceil((high - low) / (0.1 * scale)), edges = [];
      for (let i = first; i <= last; i++) edges.push(Math.min(high, Math.max(low, inverse(i * grid))));
      for (let i = 0; i <= pieces; i++) edges.push(low + (high - low) * i / pieces);
      const sorted = Float64Array.from(edges).sort(), masses = new Float64Array(last - first + 1);
      for (let piece = 0; piece + 1 < sorted.length; piece++) {
        const length = sorted[piece + 1] - sorted[piece];
        if (!(length > 0)) continue;
        const values = FOUR.map(([node]) => at(sorted[piece] + length * (node + 1) / 2));
        const mean = values.reduce((sum, value) => sum + value[0], 0) / 4;
        const cell = Math.min(last - 1, Math.max(first, Math.floor(mean / grid)));
        values.forEach(([value, density], i) => {
          const upper = Math.min(1, Math.max(0, Math.expm1(cell * grid - value) / Math.expm1(-grid)));
          const mass = length / 2 * FOUR[i][1] * Math.exp(density + tilt * cell * grid - scaled);
          masses[cell - first] += mass * (1 - upper);
          masses[cell - first + 1] += mass * upper * Math.exp(tilt * grid);
        });
      }
      const total = masses.reduce((sum, mass) => sum + mass, 0);
      return { first, masses: masses.map((mass) => mass / total), logMass: Math.log(total) + scaled, cut: count * Math.exp(LOG_NEGLIGIBLE) };
    };
    return { noise, std: Math.sqrt(variance(0)), variance, logMoment, discretised, logCapped };
  }

  // Ends between which the tilted sum of the losses on the grid lies but for e^LOG_OUTSIDE on either side.
  function window_(step, steps, tilt, grid) {
    const here = step.logMoment(tilt);
    const [few, many] = [tilt, 1 / Math.max(Math.sqrt(steps * step.variance(tilt)), 1e-6 / tilt)].sort((x, y) => x - y);
    const offsets = spaced(0.03 * few, 30 * many, Math.floor(8 * Math.log10(1e3 * many / few)));
    const reach = (sign) => Math.min(...offsets.map((offset) => {
      const moved = tilt + sign * offset;
      const rise = step.logMoment(moved) - here + Math.max(0, moved * (1 + moved)) * grid * grid / 8;
      const value = (steps * rise - LOG_OUTSIDE) / offset;
      return Number.isNaN(value) ? Infinity : value;
    }));
    return [-reach(-1), reach(1)];
  }

  // The `steps`-fold convolution of masses at first, first + 1, ..., on a circle from `start`.
  function convolved(first, masses, steps, start, least) {
    let size = 16;
    while (size < least) size *= 2;
    const centre = first + Math.round(masses.reduce((sum, mass, i) => sum + mass * i, 0));
    const real = new Float64Array(size), imaginary = new Float64Array(size);
    const wrapped = (index) => ((index % size) + size) % size;
    masses.forEach((mass, i) => { real[wrapped(first - centre + i)] += mass; });
    fourier(real, imaginary, false);
    for (let i = 0; i < size; i++) {
      const length = Math.exp(steps * Math.log(Math.hypot(real[i], imaginary[i])));
      const angle = steps * Math.atan2(imaginary[i], real[i]);
      real[i] = length * Math.cos(angle);
      imaginary[i] = length * Math.sin(angle);
    }
    fourier(real, imaginary, true);
    return real.map((_, i) => Math.max(0, real[wrapped(start - steps * centre + i)]));
  }

  // The loss of a whole run on a grid, accurate near `epsilon`, an upper bound everywhere.
  function composed(step, steps, epsilon, tilts, moments, steepness, largest) {
    let tilt = tilts[0], best = Infinity;
    tilts.forEach((each, i) => {
      const value = moments[i] - each * (epsilon + Math.log1p(1 / each)) - Math.log1p(each);
      if (value < best) [best, tilt] = [value, each];
    });
    let [low, high] = window_(step, steps, tilt, 0);
    const slope = Math.max(steepness, tilt);
    const allowed = TOLERANCE * Math.max(epsilon, 1e-3 / slope);
    let grid = Math.min(Math.sqrt(12 * allowed / (steps * (1 + slope))), 1e-4 * Math.max(1, epsilon / 10), 1 / slope,
      (epsilon + 0.01 / slope) / 100);
    grid = Math.max(grid, (high - low) / (largest - 2));
    [low, high] = window_(step, steps, tilt, grid);
    const one = step.discretised(grid, tilt);
    let { first, masses } = one, slack = steps * one.cut;
    if (steps > 1) {
      first = Math.floor(low / grid);
      masses = convolved(one.first, one.masses, steps, first, (high - low) / grid + 2);
      slack += 2 * Math.exp(LOG_OUTSIDE) + TRANSFORM * steps;
    }
    const rise = one.logMass - step.logMoment(tilt);
    return { grid, tilt, first, masses, slack, logScale: steps * one.logMass, logCapped: step.logCapped + Math.log(steps),
      error: steps * Math.max(rise, 0) / tilt };
  }

  // The logarithm of the bound on delta at an epsilon, and its derivative.
  function logDelta(loss, epsilon) {
    let all = 0, total = 0;
    const start = Math.max(0, Math.floor(epsilon / loss.grid) + 1 - loss.first);
    for (let i = start; i < loss.masses.length; i++) {
      const above = Math.max(0, (loss.first + i) * loss.grid - epsilon), mass = loss.masses[i] * Math.exp(-loss.tilt * above);
      all += mass;
      total -= mass * Math.expm1(-above);
    }
    const slack = loss.slack / (1 + loss.tilt);
    const below = loss.logScale - loss.tilt * epsilon + Math.log(total + slack);
    const value = logSumExp([below, loss.logCapped]);
    const slope = -(loss.tilt * slack + Math.max(0, all - total)) / (total + slack);
    return [Math.min(0, value), slope * Math.exp(below - value)];
  }

  // The logarithm of the bound on delta at each of many epsilons, read at the point of the grid below, where it is larger:
  // sums over all that lies above a point, each from the one before.
  function logDeltas(loss, epsilons) {
    const { grid, tilt, first, masses } = loss, count = masses.length;
    const decay = [Math.exp(-tilt * grid), Math.exp(-(1 + tilt) * grid)], above = new Float64Array(count + 1);
    let all = 0, less = 0;
    for (let i = count - 1; i >= 0; i--) {
      all = decay[0] * (all + masses[i]);
      less = decay[1] * (less + masses[i]);
      above[i] = Math.max(0, all - less);           // at the point first + i - 1
    }
    return epsilons.map((epsilon) => {
      const place = Math.floor(epsilon / grid), i = place + 1 - first;
      const gap = Math.max(0, -i) * grid;
      const total = i >= 0 ? above[Math.min(i, count)] : Math.max(0, all * Math.exp(-tilt * gap) - less * Math.exp(-(1 + tilt) * gap));
      const below = loss.logScale - tilt * place * grid + Math.log(total * (1 + 1e-9) + loss.slack / (1 + tilt));
      return Math.min(0, logSumExp([below, loss.logCapped]));
    });
  }

  // The least epsilon at which the bound meets delta, from above.
  function epsilonOf(loss, delta, guess) {
    const target = Math.log(delta);
    if (loss.logCapped >= target) return Infinity;
    if (logDelta(loss, 0)[0] <= target) return 0;
    let low = 0, high = Infinity, root = Math.max(guess, loss.grid);
    for (let i = 0; i < 200; i++) {
      const [value, slope] = logDelta(loss, root), last = root;
      if (value <= target) high = root; else low = root;
      root = slope ? root + (target - value) / slope : NaN;
      if (!(root >= low && root <= high)) root = high === Infinity ? 2 * low : (low + high) / 2;
      if (Math.abs(root - last) <= 1e-9 * root) break;
    }
    for (let by = 1e-10; logDelta(loss, root)[0] > target; by *= 2) root *= 1 + by;
    return root;
  }

  // A step in one direction, cut so that what is cut counts little beside delta; tilts and the moments of the run there; the
  // epsilon that the moments give at a delta.
  function prepared(rate, noise, steps, delta, removing) {
    const step = stepOf(rate, noise, removing, Math.log(1e-5 * delta) - Math.log(steps));
    const [few, many] = [1 / (step.std * Math.sqrt(steps)), noise].sort((x, y) => x - y);
    const wide = spaced(1e-3 * few, 1e2 * many, Math.floor(10 * Math.log10(1e5 * many / few)));
    const tilts = wide.filter((tilt) => Number.isFinite(step.logMoment(1.2 * tilt)));
    const moments = tilts.map((tilt) => steps * step.logMoment(tilt));
    const epsilonAt = (delta) => Math.max(0, Math.min(...tilts.map((tilt, i) =>
      (moments[i] - Math.log(delta) - Math.log1p(tilt)) / tilt - Math.log1p(1 / tilt))));
    return { step, tilts, moments, epsilonAt };
  }

  function directed(rate, noise, steps, delta, removing, largest) {
    const { step, tilts, moments, epsilonAt } = prepared(rate, noise, steps, delta, removing);
    let epsilon = epsilonAt(delta);
    let slope = 0, coarser = Infinity, error = 0, best = Infinity;
    for (let round = 0; round < 4; round++) {
      const loss = composed(step, steps, epsilon, tilts, moments, slope, largest);
      epsilon = epsilonOf(loss, delta, epsilon);
      slope = -logDelta(loss, epsilon)[1];
      error = loss.error * Math.max(1, (1 + slope) / (1 + loss.tilt));
      if (epsilon < 20 * loss.grid) error = Math.max(error, loss.grid);
      best = Math.min(best, epsilon);
      if (epsilon === 0 || error <= 2 * TOLERANCE * epsilon || loss.grid > 0.8 * coarser) break;
      coarser = loss.grid;
    }
    return { epsilon: best, error };
  }

  // {epsilon, error}: an upper bound, and about how much of it is the grid's doing.  A hair more than what was found, so that
  // it is not below what a finer grid would give either.  A smaller `largest` grid is faster, and adds more.
  function epsilonByLosses(rate, noise, steps, delta, largest = LARGEST_GRID) {
    const hair = (value) => value * (1 + 2e-4);
    if (rate === 1) {
      const epsilon = gaussianEpsilon(Math.sqrt(steps) / noise, delta);
      return { epsilon: hair(epsilon), error: hair(epsilon) - epsilon };
    }
    if (steps * rate * (1 - 2 * upperTail(0.5 / noise)) <= delta) return { epsilon: 0, error: 0 };
    const removed = directed(rate, noise, steps, delta, true, largest);
    // Adding an example never costs more than -steps ln(1 - q), and at epsilon 0 both directions are one.
    const adding = removed.epsilon > 0 && removed.epsilon < -steps * Math.log1p(-rate);
    const added = adding ? directed(rate, noise, steps, delta, false, largest) : { epsilon: 0, error: 0 };
    const worst = added.epsilon > removed.epsilon ? added : removed;
    return { epsilon: hair(worst.epsilon), error: worst.error + 2e-4 * worst.epsilon };
  }

  // At which deltas the grids of a profile are accurate, their size, how many epsilons it has, and up to which delta.
  const ANCHORS = [0.1, 1e-3, 1e-6], PROFILE_GRID = 1 << 15, PLACES = 200, SMALLEST = 1e-8;

  // [epsilon, delta] at many epsilons, delta never below that of either direction of the run: the least that a few grids give.
  function profileOf(rate, noise, steps) {
    const places = (last) => Array.from({ length: PLACES + 1 }, (_, i) => last * i / PLACES);
    const profile = (epsilons, deltas) => epsilons.map((epsilon, i) => [epsilon, Math.min(1, deltas[i] * (1 + 1e-3) + 1e-12)]);
    if (rate === 1) {
      const mu = Math.sqrt(steps) / noise, epsilons = places(gaussianEpsilon(mu, SMALLEST));
      return profile(epsilons, epsilons.map((epsilon) => Math.max(0, gaussianDelta(mu, epsilon))));
    }
    const directions = [true, false].map((removing) => prepared(rate, noise, steps, SMALLEST, removing));
    const epsilons = places(Math.max(...directions.map(({ epsilonAt }) => epsilonAt(SMALLEST))));
    const bounds = directions.map(({ step, tilts, moments, epsilonAt }) => {
      const found = ANCHORS.map((delta) => logDeltas(composed(step, steps, epsilonAt(delta), tilts, moments, 0, PROFILE_GRID), epsilons));
      return epsilons.map((_, i) => Math.min(...found.map((values) => values[i])));
    });
    // The total variation of a run is at most the sum of its steps'.
    const most = steps * rate * (1 - 2 * upperTail(0.5 / noise));
    return profile(epsilons, epsilons.map((_, i) => Math.min(most, Math.exp(Math.max(...bounds.map((values) => values[i]))))));
  }

  // The attacker's best true-positive rate as a function of the false-positive rate, never below the truth: whoever tells
  // runs with an example from runs without it is right about those at most e^epsilon times as often as wrong about
  // these, and delta more; and the same of those that it lets pass; at every epsilon.
  function attackerOf(rate, noise, steps) {
    const profile = profileOf(rate, noise, steps);
    return (falsePositives) => Math.min(1, ...profile.map(([epsilon, delta]) => Math.min(
      delta + Math.exp(Math.min(1, epsilon + Math.log(falsePositives))), 1 - Math.exp(-epsilon) * (1 - delta - falsePositives))));
  }

  return { ORDERS, renyi, epsilonByRenyi, epsilonByLosses, profileOf, attackerOf, upperTail,
    parts: { LOG_OUTSIDE, fourier, stepOf, window_, convolved, prepared, spaced } };
})();

if (typeof module !== "undefined") module.exports = accountant;
