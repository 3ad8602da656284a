// A batch before and after, as two bars on one scale.

const KIND_COLOURS = ["var(--blue)", "var(--amber)", "var(--green)", "var(--purple)", "var(--orange)", "var(--sky)", "var(--grey)", "var(--soft)"];

function showTimes(goals, highPrecision) {
  const section = find("#time");
  section.hidden = false;
  const kinds = [...new Set(goals.flatMap((goal) => goal.kinds.map(({ kind }) => kind)))];
  find(".bars", section).replaceChildren(...goals.map((goal, index) => {
    const chart = make("div", { class: "chart" });
    requestAnimationFrame(() => drawToFit(chart, (width) => renderTimes(goal, kinds, highPrecision, width, index)));
    const title = make("h3", {}, `${goal.goal[0].toUpperCase()}${goal.goal.slice(1)}, ${goal.batch_size.toLocaleString("en")} examples: ${goal.speedup}`);
    return make("div", { class: "goal" }, title, chart, kindKey(goal, kinds, index));
  }));
}

// A kind's colour is the same for all goals. Of a goal's pieces every other one is hatched: neighbours differ without colour.
// Time in which nothing is done is an empty frame.
function kindLook(bar, goal, kinds, patterns) {
  if (bar.is_idle) return { fill: "var(--paper)", stroke: "var(--soft)", "stroke-dasharray": "3 2" };
  const index = Math.max(0, kinds.indexOf(bar.kind));
  const isHatched = goal.kinds.indexOf(bar) % 2 === 1;
  return { fill: isHatched ? `url(#kind-${patterns}-${index})` : KIND_COLOURS[index % KIND_COLOURS.length] };
}

function kindPatterns(count, goal) {
  return draw("defs", {}, Array.from({ length: count }, (_, index) =>
    draw("pattern", { id: `kind-${goal}-${index}`, width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("rect", { width: 7, height: 7, fill: KIND_COLOURS[index % KIND_COLOURS.length] }),
      draw("line", { x1: 0, y1: 0, x2: 0, y2: 7, stroke: "var(--paper)", "stroke-width": 2.4, "stroke-opacity": 0.75 }))));
}

function renderTimes(goal, kinds, highPrecision, width, goalIndex) {
  const bars = [[highPrecision, goal.high_us, (bar) => bar.high_us], ["LoKA", goal.planned_us, (bar) => bar.planned_us]];
  const left = width < 560 ? 54 : 84;
  const right = width - (width < 560 ? 72 : 90);
  const x = linearScale([0, Math.max(goal.high_us, goal.planned_us)], [left, right]);
  const svg = draw("svg", { viewBox: `0 0 ${width} 96`, height: 96, role: "img", "aria-label": `${goal.goal}: ${duration(goal.high_us)} before, ${duration(goal.planned_us)} after` }, kindPatterns(kinds.length, goalIndex));
  const pieces = goal.kinds.length ? goal.kinds : [{ kind: "", high_us: goal.high_us, planned_us: goal.planned_us }];
  bars.forEach(([name, total, part], row) => {
    const y = 6 + 44 * row;
    const measured = pieces.reduce((sum, bar) => sum + part(bar), 0);
    svg.append(draw("text", { x: left - 10, y: y + 20, "text-anchor": "end", class: "strong" }, name));
    let start = 0;
    for (const bar of pieces) {
      const time = (part(bar) * total) / (measured || 1);
      if (time <= 0) continue;
      const show = (event) => showTip({ x: event.clientX, y: event.clientY }, bar.kind || goal.goal, [`${duration(time)}, ${percent(time / total)} of the batch`]);
      svg.append(draw("rect", { x: x(start), y, width: Math.max(0.5, x(start + time) - x(start) - 1), height: 32, ...kindLook(bar, goal, kinds, goalIndex), onpointerenter: show, onpointermove: show, onpointerleave: hideTip }));
      start += time;
    }
    svg.append(draw("text", { x: x(total) + 8, y: y + 20, class: "strong" }, duration(total)));
  });
  return svg;
}

function kindKey(goal, kinds, goalIndex) {
  return make("ul", { class: "key" }, goal.kinds.map((bar) => make("li", {},
    draw("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" }, kindPatterns(kinds.length, `key-${goalIndex}`), draw("rect", { width: 14, height: 14, rx: 2, ...kindLook(bar, goal, kinds, `key-${goalIndex}`) })),
    `${bar.kind}: ${duration(bar.high_us)} → ${duration(bar.planned_us)}`)));
}
