// Training: log-loss of both twins, and below it their difference with its interval.

const LINES = [{ colour: "var(--ink)", dash: "6 4" }, { colour: "var(--blue)", dash: null }];

function showCurves(curves) {
  const section = find("#training");
  section.hidden = false;
  find(".about", section).textContent = [
    "Log-loss of each window, taken before the model learns from its examples.",
    curves.difference ? "Both twins see the same batches; the lower panel shows their relative difference. Each dot is a window, the line is the running mean, and the band is the 95 % interval of that mean." : "",
    curves.difference && curves.other ? "The dashed line there is the same for a twin in another high precision, a change that nobody would call harmful." : "",
  ].filter(Boolean).join(" ");
  drawToFit(find(".chart", section), (width) => renderCurves(curves, width));
}

function renderCurves(curves, width) {
  const top = 300;
  const bottom = curves.difference ? 200 : 0;
  const height = top + bottom + 26;
  const left = 62;
  const box = { left, right: width - 12, top: 28, bottom: top - 12 };
  const steps = curves.curves.flatMap((curve) => curve.steps);
  const xDomain = [Math.min(...steps), Math.max(...steps)];
  const x = linearScale(xDomain, [box.left, box.right]);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Training curves" });
  const lines = [...curves.curves, ...(curves.best ? [curves.best] : [])];
  const values = lines.flatMap((curve) => curve.log_loss);
  // The first steps of a run would flatten the rest: what lies far above the usual is cut off.
  const sorted = curves.curves.flatMap((curve) => curve.log_loss).sort((a, b) => a - b);
  const [usual, high] = [0.5, 0.9].map((part) => sorted[Math.floor(part * (sorted.length - 1))]);
  const settled = Math.min(sorted.at(-1), usual + 3 * (high - usual) || usual);
  const low = Math.min(...values);
  const yDomain = [low - 0.05 * (settled - low || low), settled + 0.12 * (settled - low || low)];
  const y = linearScale(yDomain, [box.bottom, box.top]);
  panel(svg, box, y, linearTicks(...yDomain, 5), (tick) => significant(tick, 4), "log-loss");
  svg.append(draw("clipPath", { id: "curve-box" }, draw("rect", { x: box.left, y: box.top - 4, width: box.right - box.left, height: box.bottom - box.top + 8 })));
  if (curves.best) svg.append(line(curves.best.steps, curves.best.log_loss, x, y, "var(--grey)", "2 3"));
  curves.curves.forEach((curve, index) => {
    const style = LINES[curves.curves.length === 1 ? 1 : index];
    svg.append(line(curve.steps, curve.log_loss, x, y, style.colour, style.dash));
  });
  svg.append(legend(curves, box));
  let base = box.bottom;
  if (curves.difference) base = difference(svg, curves, { ...box, top: top + 26, bottom: top + bottom - 14 }, x);
  for (const tick of linearTicks(...xDomain, width < 560 ? 4 : 8))
    svg.append(draw("text", { x: x(tick), y: base + 18, "text-anchor": "middle" }, tick.toLocaleString("en")));
  svg.append(draw("text", { x: box.right, y: base + 34, "text-anchor": "end" }, "step"));
  hoverSteps(svg, curves, x, box, base);
  return svg;
}

function panel(svg, box, y, ticks, write, title) {
  for (const tick of ticks)
    svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, write(tick)));
  svg.append(draw("text", { x: 0, y: box.top - 14, class: "strong" }, title));
}

function line(steps, values, x, y, colour, dash) {
  if (steps.length === 1) return draw("circle", { cx: x(steps[0]), cy: y(values[0]), r: 3, fill: colour });
  const points = steps.map((step, index) => `${x(step).toFixed(1)},${y(values[index]).toFixed(1)}`);
  return draw("polyline", { points: points.join(" "), fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash, "stroke-linejoin": "round", "clip-path": "url(#curve-box)" });
}

function legend(curves, box) {
  const entries = [
    ...curves.curves.map((curve, index) => [curve.name, LINES[curves.curves.length === 1 ? 1 : index]]),
    ...(curves.best ? [[curves.best.name, { colour: "var(--grey)", dash: "2 3" }]] : []),
  ];
  let offset = box.right;
  const group = draw("g");
  for (const [name, style] of entries.reverse()) {
    offset -= 7 * name.length + 4;
    group.append(draw("text", { x: offset, y: 14 }, name), draw("line", { x1: offset - 28, x2: offset - 6, y1: 10, y2: 10, stroke: style.colour, "stroke-width": 2, "stroke-dasharray": style.dash }));
    offset -= 44;
  }
  return group;
}

function difference(svg, { difference: change, other, other_name: otherName, curves }, box, x) {
  const sorted = [...change.change, ...(other?.change ?? [])].map(Math.abs).sort((a, b) => a - b);
  const ends = [change, other].filter(Boolean).flatMap(({ low, high }) => [...low.slice(-1), ...high.slice(-1)]).map(Math.abs);
  const reach = Math.max(0.025, sorted[Math.floor(sorted.length * 0.97)] ?? 0, ...ends) * 1.15;
  const y = linearScale([-reach, reach], [box.bottom, box.top]);
  const clamp = (value) => Math.max(-reach, Math.min(reach, value));
  const signed = (value) => minus(`${value > 0 ? "+" : ""}${significant(value)} %`);
  panel(svg, box, y, linearTicks(-reach, reach, 4), signed, `LoKA against ${curves[0].name}`);
  svg.append(draw("line", { class: "axis", x1: box.left, x2: box.right, y1: y(0), y2: y(0) }));
  if (other) {
    svg.append(...meanWithBand(other, x, (value) => y(clamp(value)), "var(--grey)", "6 4"));
    svg.append(draw("text", { x: box.right, y: box.top - 14, "text-anchor": "end" }, `dashed: ${otherName}`));
  }
  svg.append(...meanWithBand(change, x, (value) => y(clamp(value)), "var(--blue)", null));
  change.change.forEach((value, index) => svg.append(draw("circle", { cx: x(change.steps[index]), cy: y(clamp(value)), r: 2, fill: "var(--blue)", "fill-opacity": 0.55 })));
  return box.bottom;
}

function meanWithBand(change, x, y, colour, dash) {
  if (!change.mean.length) return [];
  const later = change.steps.slice(1);
  const edge = (values) => later.map((step, index) => `${x(step).toFixed(1)},${y(values[index]).toFixed(1)}`);
  return [
    draw("polygon", { points: [...edge(change.low), ...edge(change.high).reverse()].join(" "), fill: colour, "fill-opacity": 0.15 }),
    draw("polyline", { points: edge(change.mean).join(" "), fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash }),
  ];
}

// The nearest step's numbers, wherever the pointer is above the chart.
function hoverSteps(svg, curves, x, box, base) {
  const steps = curves.curves[0].steps;
  const rule = draw("line", { class: "axis", y1: box.top, y2: base, visibility: "hidden" });
  const area = draw("rect", { x: box.left, y: box.top, width: box.right - box.left, height: base - box.top, fill: "transparent" });
  const hide = () => { rule.setAttribute("visibility", "hidden"); hideTip(); };
  area.addEventListener("pointerleave", hide);
  area.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const nearest = steps.reduce((best, step, index) => (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at) ? index : best), 0);
    const step = steps[nearest];
    rule.setAttribute("x1", x(step));
    rule.setAttribute("x2", x(step));
    rule.setAttribute("visibility", "visible");
    const lines = [...curves.curves, ...(curves.best ? [curves.best] : [])].map((curve) => {
      const index = curve.steps.indexOf(step);
      return index < 0 ? "" : `${curve.name} ${curve.log_loss[index].toFixed(5)}`;
    });
    const index = curves.difference?.steps.indexOf(step) ?? -1;
    if (index >= 0) lines.push(minus(`difference ${curves.difference.change[index].toFixed(3)} %`));
    showTip({ x: event.clientX, y: event.clientY }, `step ${step.toLocaleString("en")}`, lines);
  });
  svg.append(rule, area);
}
