// A site's x and dy by binade, over the bands of an 8-bit format: full precision, fewer bits, flushed to zero.

function showDistributions(sites, formats) {
  const section = find("#distributions");
  section.hidden = false;
  const state = { site: sites[0].site, format: sites[0].format || formats[0].name };
  const select = make("select", { "aria-label": "Site", onchange: (event) => choose(event.target.value) }, sites.map(({ site }) => make("option", { value: site }, site)));
  const formatChoice = make("span");
  const notes = make("span", { class: "found" });
  find(".filters", section).replaceChildren(select, formatChoice, notes);

  function update() {
    const site = sites.find((candidate) => candidate.site === state.site);
    const format = formats.find((candidate) => candidate.name === state.format) ?? formats[0];
    formatChoice.replaceChildren(choices("Format", formats.map(({ name }) => [name, name]), format.name, (name) => { state.format = name; update(); }));
    notes.textContent = (site.notes ?? []).join("; ");
    const tensors = [["x", "activations, the input of the layer", site.x], ["dy", "gradients of the output", site.dy]];
    find(".pair", section).replaceChildren(...tensors.map(([name, what, histogram]) => {
      const figure = make("figure", {}, make("figcaption", {}, make("b", {}, name), make("span", {}, what)));
      if (!histogram) { figure.append(make("p", { class: "empty" }, "No values to show: all were zero, or the Probe saw none (the site was not trained, or no gradient reached it).")); return figure; }
      const chart = make("div", { class: "chart" });
      figure.append(chart, zoneList(histogram, format));
      requestAnimationFrame(() => drawToFit(chart, (width) => renderHistogram(name, histogram, format, width)));
      return figure;
    }));
  }
  function choose(site) {
    if (!sites.some((candidate) => candidate.site === site)) return;
    state.site = site;
    state.format = sites.find((candidate) => candidate.site === site).format || state.format;
    select.value = site;
    update();
  }
  update();
  return choose;
}

// The edges of the bands as powers of two: the top of the format lies at the top of the values.
function bandEdges(histogram, format) {
  const top = Math.log2(histogram.below);
  return { top, normal: top - format.normal, flush: top - format.flush };
}

// Shares of all values by band; a binade that an edge cuts is split in proportion, as if even within.
function bandShares(histogram, format) {
  const edges = bandEdges(histogram, format);
  const below = (edge) => histogram.shares.reduce((sum, share, index) => {
    const start = histogram.first + index;
    return sum + share * Math.min(1, Math.max(0, edge - start));
  }, 0);
  const flush = below(edges.flush);
  const coarse = below(edges.normal) - flush;
  return { flush, coarse, full: Math.max(0, 1 - histogram.zeros - flush - coarse), zeros: histogram.zeros };
}

function hatch(id, colour) {
  return draw("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    draw("rect", { width: 6, height: 6, fill: colour }), draw("line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--orange)", "stroke-width": 1.2, "stroke-opacity": 0.55 }));
}

function zoneList(histogram, format) {
  const shares = bandShares(histogram, format);
  const rows = [
    [shares.full, "kept with all of the format's bits", "var(--wash)"],
    [shares.coarse, "kept with fewer bits", "var(--coarse-wash)"],
    [shares.flush, "flushed to zero", "url(#zone-flush)"],
    [shares.zeros, "exact zeros already", "none"],
  ];
  return make("ul", { class: "zones" }, rows.map(([share, text, fill]) => make("li", {},
    draw("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" }, draw("defs", {}, hatch("zone-flush", "var(--flush-wash)")), draw("rect", { x: 0.5, y: 0.5, width: 17, height: 11, fill, stroke: "var(--rule)" })),
    make("b", {}, percent(share)), text)));
}

function renderHistogram(name, histogram, format, width) {
  const height = 220;
  const box = { left: 40, right: width - 4, top: 22, bottom: height - 38 };
  const edges = bandEdges(histogram, format);
  const from = Math.min(histogram.first, Math.floor(edges.flush) - 2);
  const to = Math.ceil(edges.top) + 1;
  const x = linearScale([from, to], [box.left, box.right]);
  const highest = Math.max(...histogram.shares, 1e-9);
  const y = linearScale([0, highest * 1.12], [box.bottom, box.top]);
  const id = `flush-${name}`;
  const clamp = (value) => Math.min(box.right, Math.max(box.left, x(value)));
  const band = (start, end, fill) => draw("rect", { x: clamp(start), y: box.top, width: Math.max(0, clamp(end) - clamp(start)), height: box.bottom - box.top, fill });
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Distribution of ${name} against ${format.name}` },
    draw("defs", {}, hatch(id, "var(--flush-wash)")),
    band(edges.normal, edges.top, "var(--wash)"), band(edges.flush, edges.normal, "var(--coarse-wash)"), band(from, edges.flush, `url(#${id})`));
  for (const tick of linearTicks(0, highest, 3))
    svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, `${significant(100 * tick)} %`));
  const bar = x(1) - x(0);
  histogram.shares.forEach((share, index) => {
    if (share <= 0) return;
    const power = histogram.first + index;
    const show = (event) => showTip({ x: event.clientX, y: event.clientY }, `${percent(share)} of the values`, [`${significant(2 ** power)} ≤ |${name}| < ${significant(2 ** (power + 1))}`]);
    svg.append(draw("rect", { x: x(power) + bar * 0.06, width: bar * 0.88, y: y(share), height: Math.max(1, box.bottom - y(share)), fill: "var(--blue)", "fill-opacity": 0.8, onpointerenter: show, onpointermove: show, onpointerleave: hideTip }));
  });
  const powers = linearTicks(from, to, width < 420 ? 4 : 6).filter(Number.isInteger);
  svg.append(
    draw("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    ...powers.map((power) => draw("text", { x: x(power), y: box.bottom + 17, "text-anchor": "middle" }, "2", draw("tspan", { dy: -5, "font-size": "9px" }, minus(String(power))))),
    draw("text", { x: box.right, y: box.bottom + 33, "text-anchor": "end" }, `|${name}|`),
    draw("line", { class: "limit", x1: x(edges.top), x2: x(edges.top), y1: box.top, y2: box.bottom }),
    draw("text", { x: x(edges.top) - 4, y: box.top - 7, "text-anchor": "end" }, `all below ${significant(histogram.below)}`));
  return svg;
}
