// The plan as a table that sorts and filters.

const FIRST_ROWS = 60;
const COLUMNS = [
  { key: "site", label: "Site", value: (row) => row.site },
  { key: "role", label: "Role", value: (row) => ["fprop", "dgrad", "wgrad"].indexOf(row.role) },
  { key: "kernel", label: "Kernel", value: (row) => row.kernel },
  { key: "error", label: "Error", number: true, value: (row) => row.error ?? -1 },
  { key: "speedup", label: "Speed-up", number: true, value: (row) => row.speedup },
  { key: "share", label: "Share of time", number: true, value: (row) => row.share },
  { key: "reason", label: "Why", value: (row) => row.reason },
];

function showPlan(rows, onSelect) {
  const section = find("#plan");
  section.hidden = false;
  const state = { text: "", role: "all", precision: "all", sort: "share", descending: true, all: false };
  const found = make("span", { class: "found", role: "status" });
  const change = (changes) => { Object.assign(state, changes); update(); };
  const roles = ["fprop", "dgrad", "wgrad"].filter((role) => rows.some((row) => row.role === role));
  find(".filters", section).replaceChildren(
    make("input", { type: "search", placeholder: "Filter by site, kernel or reason", "aria-label": "Filter by site, kernel or reason", oninput: (event) => change({ text: event.target.value.trim().toLowerCase() }) }),
    ...(roles.length > 1 ? [choices("Role", [["all", "all roles"], ...roles.map((role) => [role, role])], "all", (role) => change({ role }))] : []),
    choices("Precision", [["all", "all"], ["low", "low precision"], ["high", "high precision"]], "all", (precision) => change({ precision })),
    found,
  );
  find(".filters", section).addEventListener("submit", (event) => event.preventDefault());
  const fastest = Math.max(...rows.map((row) => row.speedup), 1);

  function selected() {
    const column = COLUMNS.find(({ key }) => key === state.sort);
    const sign = state.descending ? -1 : 1;
    return rows
      .filter((row) => state.role === "all" || row.role === state.role)
      .filter((row) => state.precision === "all" || row.is_low_precision === (state.precision === "low"))
      .filter((row) => !state.text || `${row.site} ${row.kernel} ${row.reason} ${row.shape}`.toLowerCase().includes(state.text))
      .sort((a, b) => { const [p, q] = [column.value(a), column.value(b)]; return p < q ? -sign : p > q ? sign : 0; });
  }

  function header() {
    return make("tr", {}, COLUMNS.map((column) => {
      const sorted = state.sort === column.key;
      const order = state.descending ? "descending" : "ascending";
      const press = () => change({ sort: column.key, descending: sorted ? !state.descending : Boolean(column.number) });
      return make("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": sorted ? order : null },
        make("button", { type: "button", "data-sort": column.key, onclick: press }, column.label, make("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (state.descending ? "↓" : "↑") : "")));
    }));
  }

  function update() {
    const focused = document.activeElement?.dataset?.sort;
    const chosen = selected();
    const shown = state.all ? chosen : chosen.slice(0, FIRST_ROWS);
    found.textContent = chosen.length === rows.length ? counted(rows.length, "row") : `${chosen.length} of ${counted(rows.length, "row")}`;
    const table = make("table", {}, make("thead", {}, header()), make("tbody", {}, shown.map((row) => planRow(row, fastest, onSelect))));
    const rest = chosen.length - shown.length;
    const more = make("button", { type: "button", class: "quiet more", onclick: () => change({ all: true }) }, `Show the other ${rest}`);
    find(".table", section).replaceChildren(table, ...(chosen.length ? [] : [make("p", { class: "empty" }, "No row matches: clear the filter.")]), ...(rest ? [more] : []));
    if (focused) find(`[data-sort="${focused}"]`, section)?.focus();
  }
  update();
}

function planRow(row, fastest, onSelect) {
  const error = row.error === undefined || row.error === null ? ["–"] : [
    withInterval(row.error, row.error_low, row.error_high),
    meter(row.error / row.limit, "low", `${percent(row.error / row.limit)} of the limit ${row.limit}`),
  ];
  const cell = (column, extra, ...children) => make("td", { "data-label": column.label, class: [column.key === "reason" ? "why" : column.key, column.number ? "number" : ""].join(" ").trim(), ...extra }, ...children);
  const [site, role, kernel, errors, speed, share, why] = COLUMNS;
  return make("tr", { class: row.is_low_precision ? "low" : "high" },
    cell(site, {}, make("button", { type: "button", class: "site-link", onclick: () => onSelect(row.site) }, breakable(row.site)), make("span", { class: "sub" }, row.shape)),
    cell(role, {}, row.role),
    cell(kernel, {}, make("span", { class: "mono" }, breakable(row.kernel)), row.transform ? make("span", { class: "chip" }, row.transform) : null, row.fused ? make("span", { class: "sub" }, `with ${row.fused}`) : null),
    cell(errors, {}, error),
    cell(speed, {}, times(row.speedup), meter(row.speedup / fastest, row.speedup > 1 ? "low" : "", "")),
    cell(share, {}, percent(row.share)),
    cell(why, {}, row.reason));
}

function meter(part, kind, title) {
  return make("span", { class: `meter ${kind}`, title: title || null, "aria-hidden": "true" }, make("i", { style: `width: ${(100 * Math.min(1, Math.max(0.02, part))).toFixed(1)}%` }));
}
