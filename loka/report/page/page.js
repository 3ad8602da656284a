// The page: reads the data once and shows what is there.

const page = JSON.parse(find("#data").textContent);

function applyTheme(theme) {
  const dark = theme === "dark" || (theme === "auto" && window.matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  find("#theme").textContent = `Theme: ${theme}`;
}

function remembered() {
  try { return localStorage.getItem("loka-theme") ?? "auto"; } catch { return "auto"; } // a file may have no storage
}

function startTheme() {
  let theme = remembered();
  applyTheme(theme);
  find("#theme").addEventListener("click", () => {
    theme = { auto: "dark", dark: "light", light: "auto" }[theme];
    applyTheme(theme);
    try { localStorage.setItem("loka-theme", theme); } catch { /* then it lasts as long as the page */ }
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(theme));
}

function showHeadline() {
  document.title = `${page.headline} · LoKA`;
  find("#run-title").textContent = page.title;
  find("#headline").textContent = page.headline;
  find("#summary").replaceChildren(...page.summary.map((sentence) => make("p", {}, sentence)));
  find("#tiles").replaceChildren(...(page.tiles ?? []).map((tile) =>
    make("div", { class: tile.is_good === true ? "good" : tile.is_good === false ? "bad" : null },
      make("dt", {}, tile.label), make("dd", { class: "value" }, tile.value), make("dd", { class: "note" }, tile.note ?? ""))));
}

// First where there is little else to see, last where there is.
function showMissing(parts) {
  find("#missing").hidden = false;
  if (page.site_map) find("main").append(find("#missing"));
  find("#missing .cards").replaceChildren(...parts.map((part) =>
    make("div", { class: "card" }, make("h3", {}, part.part), make("p", { class: "soft" }, part.why), make("pre", {}, make("code", {}, part.command)))));
}

function showRejected(rejections) {
  find("#rejected").hidden = false;
  find("#rejected .list").replaceChildren(...rejections.map((rejection) => make("details", {},
    make("summary", {}, make("span", { class: "mono" }, rejection.kernels.length > 2 ? `${rejection.kernels.length} kernels` : rejection.kernels.join(", ")), make("span", { class: "first" }, rejection.reasons.length > 1 ? "most often: " : "", rejection.reasons[0].reason), make("span", { class: "count" }, `rejected ${counted(rejection.count, "time")}`)),
    rejection.kernels.length > 2 ? make("p", { class: "mono where" }, rejection.kernels.join(", ")) : null,
    make("ul", {}, rejection.reasons.map((entry) => {
      const rest = entry.count - entry.where.length;
      return make("li", {}, entry.reason, make("span", { class: "where mono" }, entry.where.join(", "), rest ? ` and ${rest} more` : ""));
    })))));
}

function showFindings(findings) {
  find("#findings").hidden = false;
  find("#findings .cards").replaceChildren(...findings.map((finding) => make("div", { class: "card" },
    finding.site ? make("h3", {}, make("span", { class: "mono" }, finding.site), finding.kind ? make("span", { class: "chip" }, finding.kind) : null) : null,
    make("p", {}, finding.message),
    finding.numbers ? make("p", { class: "soft" }, finding.numbers) : null,
    finding.remedy ? make("p", { class: "remedy" }, finding.remedy) : null)));
}

function showEnvironment() {
  find("#environment").hidden = false;
  find("#environment .facts").replaceChildren(...page.environment.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const uncovered = page.uncovered ?? [];
  find("#environment .uncovered").hidden = uncovered.length === 0;
  find("#environment .uncovered ul").replaceChildren(...uncovered.map((text) => make("li", {}, text)));
}

function showContents() {
  const names = { missing: "Missing", map: "Map", plan: "Plan", rejected: "Rejected", distributions: "Values", findings: "Findings", training: "Training", time: "Time", environment: "Environment" };
  const shown = [...document.querySelectorAll("main > section[id]:not([hidden])")];
  find("#contents").replaceChildren(...shown.map(({ id }) => make("a", { href: `#${id}` }, names[id])));
}

// A site chosen anywhere is marked on the map and its distribution shown.
let chooseDistribution = () => {};
function selectSite(site) {
  for (const mark of document.querySelectorAll(".point")) mark.classList.toggle("is-selected", mark.dataset.site === site);
  chooseDistribution(site);
  if (!find("#distributions").hidden) find("#distributions").scrollIntoView();
}

startTheme();
showHeadline();
if (page.missing?.length) showMissing(page.missing);
if (page.site_map?.points.length) showMap(page.site_map, selectSite);
if (page.plan?.length) showPlan(page.plan, selectSite);
if (page.rejected?.length) showRejected(page.rejected);
if (page.distributions?.length) chooseDistribution = showDistributions(page.distributions, page.formats);
if (page.findings?.length) showFindings(page.findings);
if (page.curves) showCurves(page.curves);
if (page.times?.length) showTimes(page.times, page.high_precision ?? "high precision");
if (page.environment?.length) showEnvironment();
showContents();
window.addEventListener("scroll", hideTip, { passive: true });
