// The map: every site by error and speed-up, in four fields. Up is more accurate, right is faster.

const FIELDS = [
  { name: "safe and fast", safe: true, fast: true, shape: "circle" },
  { name: "safe, but slow", safe: true, fast: false, shape: "square" },
  { name: "fast, but unsafe", safe: false, fast: true, shape: "triangle" },
  { name: "neither", safe: false, fast: false, shape: "diamond" },
];
const fieldOf = (point) => FIELDS.findIndex((field) => field.safe === point.is_safe && field.fast === point.is_fast);

// A path around (0, 0) with the area of a circle of radius r, so that area means the same for every shape.
function shapePath(shape, r) {
  if (shape === "circle") return `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`;
  if (shape === "square") { const h = (r * Math.sqrt(Math.PI)) / 2; return `M${-h},${-h}H${h}V${h}H${-h}Z`; }
  if (shape === "diamond") { const d = r * Math.sqrt(Math.PI / 2); return `M0,${-d}L${d},0L0,${d}L${-d},0Z`; }
  const s = 2 * r * Math.sqrt(Math.PI / Math.sqrt(3)); // side of the triangle
  const h = (s * Math.sqrt(3)) / 2;
  return `M0,${(-2 * h) / 3}L${s / 2},${h / 3}L${-s / 2},${h / 3}Z`;
}

function describeField(points, index) {
  const inside = points.filter((point) => fieldOf(point) === index);
  const share = inside.reduce((sum, point) => sum + point.share, 0);
  return { count: inside.length, share };
}

function showMap(map, onSelect) {
  const section = find("#map");
  section.hidden = false;
  const chosen = map.points.filter((point) => point.is_chosen).length;
  find(".about", section).textContent =
    `Each mark is a site; its area is the site's share of the time that all sites take in high precision. ${chosen} of ` +
    `${map.points.length} are shown with the kernels that the plan chose. The others stay in high precision and are shown ` +
    `where the kernel that came closest would put them.`;
  drawToFit(find(".chart", section), (width) => renderMap(map, width, onSelect));
  find(".key", section).replaceChildren(...FIELDS.map((field, index) => {
    const { count, share } = describeField(map.points, index);
    return make("li", { class: `c${index}` },
      draw("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, draw("path", { d: shapePath(field.shape, 5.5), "fill-opacity": 0.4, "stroke-width": 1.5 })),
      make("span", { style: "color: var(--soft)" }, `${field.name}: ${counted(count, "site")}, ${percent(share)} of the time`));
  }));
  showOffTheMap(find(".off", section), map.off_the_map ?? []);
}

function showOffTheMap(details, sites) {
  details.hidden = sites.length === 0;
  find("summary", details).textContent = `${counted(sites.length, "site")} not on the map`;
  find("dl", details).replaceChildren(...sites.flatMap(([site, reason]) => [make("dt", { class: "mono" }, site), make("dd", {}, reason)]));
}

function renderMap(map, width, onSelect) {
  const narrow = width < 560;
  const height = Math.max(340, Math.min(540, Math.round(width * 0.52)));
  const box = { left: narrow ? 46 : 56, right: width - 12, top: 36, bottom: height - 46 };
  const spread = (values) => [Math.min(...values), Math.max(...values)];
  const [slowest, fastest] = spread([...map.points.map((point) => point.speedup), map.min_speedup, 1]);
  const [least, most] = spread([...map.points.map((point) => point.error), map.max_error]);
  // What is hopeless, or as good as exact, lies at the edge: the room is for what is near the limits.
  const xDomain = [Math.max(slowest, 0.1 * map.min_speedup, 0.01) / 1.3, Math.min(fastest, 30) * 1.3];
  const errorLimit = Math.min(map.max_error, 10);
  const yDomain = [Math.max(least, errorLimit / 500) / 1.8, Math.min(most, 50 * errorLimit) * 2];
  const x = clamped(logScale(xDomain, [box.left, box.right]), xDomain);
  const y = clamped(logScale(yDomain, [box.top, box.bottom]), yDomain); // the smallest error on top
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Map of sites by error and speed-up" });
  const limit = { x: x(map.min_speedup), y: y(map.max_error) };
  svg.append(draw("rect", { x: limit.x, y: box.top, width: box.right - limit.x, height: limit.y - box.top, fill: "var(--good-wash)" }));
  for (const tick of logTicks(...xDomain, narrow ? 6 : 10))
    svg.append(draw("line", { class: "grid", x1: x(tick), x2: x(tick), y1: box.top, y2: box.bottom }),
      draw("text", { x: x(tick), y: box.bottom + 18, "text-anchor": "middle" }, `${tick}×`));
  for (const tick of logTicks(...yDomain, 7))
    svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  svg.append(
    draw("line", { class: "limit", x1: limit.x, x2: limit.x, y1: box.top, y2: box.bottom }),
    draw("line", { class: "limit", x1: box.left, x2: box.right, y1: limit.y, y2: limit.y }),
    draw("text", { x: 0, y: 14, class: "strong" }, `↑ more accurate: ${map.error_axis}`),
    draw("text", { x: box.right, y: box.bottom + 38, "text-anchor": "end", class: "strong" }, "speed-up over high precision, casts included →"),
    draw("text", { x: box.left + 6, y: limit.y - 6, class: "halo" }, `limit ${significant(map.max_error)}`),
    draw("text", { x: limit.x, y: box.top - 6, "text-anchor": limit.x > box.right - 60 ? "end" : "middle" }, `limit ${map.min_speedup}×`),
  );
  svg.append(...fieldNames(box, limit, narrow), ...marks(map, x, y, narrow, onSelect), ...names(map, x, y, box, narrow));
  return svg;
}

const clamped = (scale, [from, to]) => (value) => scale(Math.min(to, Math.max(from, value)));

function fieldNames(box, limit, narrow) {
  const pad = 10;
  const corners = [
    [box.right - pad, box.top + 20, "end"], [box.left + pad, box.top + 20, "start"],
    [box.right - pad, box.bottom - pad, "end"], [box.left + pad, box.bottom - pad, "start"],
  ];
  return FIELDS.map((field, index) => {
    const [x, y, anchor] = corners[index];
    const room = field.fast ? box.right - limit.x : limit.x - box.left;
    const tall = field.safe ? limit.y - box.top : box.bottom - limit.y;
    if (room < (narrow ? 96 : 110) || tall < 44) return null;
    return draw("text", { x, y, "text-anchor": anchor, class: `field halo c${index}`, style: "fill: currentColor" }, field.name.toUpperCase());
  }).filter(Boolean);
}

const radiusOf = (map, narrow) => {
  const largest = Math.max(...map.points.map((point) => point.share), 1e-9);
  return (point) => Math.max(4, (narrow ? 22 : 34) * Math.sqrt(point.share / largest));
};

// Largest first, so that small ones lie on top. One stop for the tab key; arrows go from mark to mark.
function marks(map, x, y, narrow, onSelect) {
  const radius = radiusOf(map, narrow);
  const elements = map.points.map((point, order) => {
    const index = fieldOf(point);
    const lines = [
      `${point.kernel} · ${point.shape}`, `error ${point.error_text}`,
      `${times(point.speedup)} as fast · ${percent(point.share)} of the sites' time`, point.reason,
    ];
    const show = (event) => showTip(event.type === "focus" ? middleOf(event.target) : { x: event.clientX, y: event.clientY }, point.site, lines);
    return draw("path", {
      d: shapePath(FIELDS[index].shape, radius(point)), transform: `translate(${x(point.speedup)} ${y(point.error)})`,
      class: `point c${index}`, tabindex: order === 0 ? 0 : -1, role: "button", "data-site": point.site,
      "aria-label": [point.site, FIELDS[index].name, ...lines].join(". "),
      onpointerenter: show, onpointerleave: hideTip, onfocus: show, onblur: hideTip, onclick: () => onSelect(point.site),
    });
  });
  const move = (from, step) => {
    const next = elements[(elements.indexOf(from) + step + elements.length) % elements.length];
    elements.forEach((element) => element.setAttribute("tabindex", element === next ? 0 : -1));
    next.focus();
  };
  for (const element of elements)
    element.addEventListener("keydown", (event) => {
      if (event.key === "ArrowRight" || event.key === "ArrowDown") { move(element, 1); event.preventDefault(); }
      if (event.key === "ArrowLeft" || event.key === "ArrowUp") { move(element, -1); event.preventDefault(); }
      if (event.key === "Enter" || event.key === " ") { onSelect(element.dataset.site); event.preventDefault(); }
    });
  return elements;
}

// The sites that hold most of the time carry their names, beside or above their mark, where nothing else is.
function names(map, x, y, box, narrow) {
  const radius = radiusOf(map, narrow);
  const taken = map.points.map((point) => around(x(point.speedup), y(point.error), 2 * radius(point), 2 * radius(point)));
  const texts = [];
  for (const [index, point] of map.points.slice(0, narrow ? 4 : 10).entries()) {
    const [width, r, cx, cy] = [6.7 * point.site.length, radius(point), x(point.speedup), y(point.error)];
    const places = [[cx + r + 6 + width / 2, cy], [cx - r - 6 - width / 2, cy], [cx, cy - r - 11], [cx, cy + r + 11]];
    const free = places.map(([px, py]) => around(px, py, width, 15)).find((area) =>
      area.left >= box.left && area.right <= box.right && area.top >= box.top && area.bottom <= box.bottom &&
      taken.every((other, owner) => owner === index || apart(area, other)));
    if (!free) continue;
    taken.push(free);
    texts.push(draw("text", { x: (free.left + free.right) / 2, y: free.bottom - 3, "text-anchor": "middle", class: "halo", "aria-hidden": "true", style: "pointer-events: none; fill: var(--ink)" }, point.site));
  }
  return texts;
}

const around = (x, y, width, height) => ({ left: x - width / 2, right: x + width / 2, top: y - height / 2, bottom: y + height / 2 });
const apart = (a, b) => a.right < b.left || a.left > b.right || a.bottom < b.top || a.top > b.bottom;
