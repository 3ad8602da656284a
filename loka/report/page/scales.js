// Axes and how numbers are written on them.

function linearScale([from, to], [start, end]) {
  const span = to - from || 1;
  return (value) => start + ((value - from) / span) * (end - start);
}

function logScale([from, to], range) {
  const scale = linearScale([Math.log(from), Math.log(to)], range);
  return (value) => scale(Math.log(value));
}

// 1, 2 and 5 times powers of ten within the range; only powers of ten where that would crowd.
function logTicks(from, to, most) {
  if (!(from > 0 && to < Infinity)) return [];
  const ticks = (steps) => {
    const found = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power += 1)
      for (const step of steps) {
        const value = Number((step * 10 ** power).toPrecision(6));
        if (value >= from && value <= to) found.push(value);
      }
    return found;
  };
  const wanted = [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1]].map(ticks);
  return wanted.find((found) => found.length <= most) ?? wanted[2];
}

function linearTicks(from, to, most) {
  const rough = (to - from) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to + step * 1e-9; index += 1)
    ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

const minus = (text) => text.replace(/-/g, "−");
const significant = (value, digits = 3) =>
  value === 0 ? "0" : minus(Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(digits))) : value.toExponential(1));
// 0.0104 ± 0.0009: as many decimals as the interval's first digit needs.
function withInterval(mean, low, high) {
  const half = (high - low) / 2;
  if (!(half > 0 && half < 1)) return significant(mean);
  const decimals = Math.min(6, -Math.floor(Math.log10(half)));
  return minus(`${mean.toFixed(decimals)} ± ${half.toFixed(decimals)}`);
}
const times = (value) => `${value.toFixed(2)}×`;
const percent = (share) => {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.01) return "< 0.01 %";
  return `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
};
const duration = (us) => (us < 999.5 ? `${significant(us)} µs` : us < 999.5e3 ? `${significant(us / 1e3)} ms` : `${significant(us / 1e6)} s`);
const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
