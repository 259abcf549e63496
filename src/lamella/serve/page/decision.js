// When a reader gives no answer, if another share of the questions has one. The rules are those of the server
// (`lamella.inference.abstention.at_prior`), so that the slider needs no request; a test compares both.

const FITTED_AT = 0.5;  // share of answerable questions, where a calibration does not record it

const logit = (share) => Math.log(share) - Math.log1p(-share);
const logistic = (odds) => (odds >= 0 ? 1 / (1 + Math.exp(-odds)) : Math.exp(odds) / (1 + Math.exp(odds)));

/** Return the share of answerable questions that a reader is tuned for. */
export const tunedFor = (calibration) => calibration?.answerable ?? FITTED_AT;

/**
 * Decide about a result of the server as it would decide itself for `answerable`; null: as it is tuned.
 * `limit` is the probability of "no answer" above which the reader abstains.
 */
export function decide(result, calibration, answerable) {
  const rule = {method: "temperature", temperature: 1, bias: 0, ...calibration};
  const shift = answerable === null ? 0 : logit(answerable) - logit(tunedFor(calibration));
  const probability = (odds) => {
    if (rule.method === "features") return logistic(odds);
    if (rule.method === "isotonic") return interpolate(odds, rule.odds, shares);
    return logistic(odds / rule.temperature + rule.bias - shift);
  };
  let {null_score: odds, threshold} = result;
  let shares = rule.probability;
  if (rule.method === "features") odds -= shift;
  else if (rule.method === "temperature") threshold += rule.temperature * shift;
  else if (shift) {
    const kept = interpolate(threshold, rule.odds, shares);
    shares = shares.map((share) => logistic(logit(Math.min(1 - 1e-9, Math.max(1e-9, share))) - shift));
    const there = interpolate(kept, shares, rule.odds, rule.odds[0] - 1, rule.odds.at(-1) + 1);
    threshold = shift > 0 ? Math.max(threshold, there) : Math.min(threshold, there);
  }
  return {noAnswer: odds > threshold, naProb: probability(odds), limit: probability(threshold), threshold};
}

/** Return the share of answerable questions at which the decision about a result changes; null: nowhere in between. */
export function turningPoint(result, calibration, lowest = 0.01, highest = 0.99) {
  let [low, high] = [logit(lowest), logit(highest)];
  const abstains = (odds) => decide(result, calibration, logistic(odds)).noAnswer;
  if (abstains(low) === abstains(high)) return null;
  for (let step = 0; step < 40; step++) {
    const middle = (low + high) / 2;
    if (abstains(middle) === abstains(low)) low = middle;
    else high = middle;
  }
  return logistic((low + high) / 2);
}

/** Return the answers of a result at a decision: the best first, with their probabilities moved along. */
export function answersAt(result, decision) {
  const spans = result.answers.filter((answer) => answer.answer);
  if (result.best_guess && !spans.some((answer) => samePlace(answer, result.best_guess))) spans.unshift(result.best_guess);
  const scale = result.na_prob < 1 ? (1 - decision.naProb) / (1 - result.na_prob) : 0;
  return spans.map((answer) => ({...answer, probability: answer.probability * scale}));
}

export const samePlace = (one, other) =>
  one.start === other.start && one.end === other.end && (one.context ?? 0) === (other.context ?? 0);

// Positions of the slider are log-odds in tenths, so that 1 %, 50 % and 99 % are equally far apart.
export const toSlider = (share) => Math.round(10 * logit(share));
export const fromSlider = (position) => logistic(position / 10);

/** Interpolate linearly as numpy does; constant beyond the ends, or there as given. */
function interpolate(x, xs, ys, left = ys[0], right = ys.at(-1)) {
  if (x < xs[0]) return left;
  if (x > xs.at(-1)) return right;
  let place = xs.findLastIndex((value) => value <= x);
  if (place === xs.length - 1) return ys[place];
  const slope = (ys[place + 1] - ys[place]) / (xs[place + 1] - xs[place]);
  return ys[place] + slope * (x - xs[place]);
}
