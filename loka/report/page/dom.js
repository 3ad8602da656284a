// Building elements. Text is always set as text, never as HTML: names come from a user's model.

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const make = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const find = (selector, within = document) => within.querySelector(selector);

// A dotted name that may be broken behind its dots and underscores, and nowhere else.
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, index) => (index ? [make("wbr"), part] : [part]));

// Draws again whenever the width changes, so that text keeps its size and charts use the room they have.
function drawToFit(container, render) {
  let width = 0;
  const update = () => {
    const now = Math.floor(container.getBoundingClientRect().width);
    if (now > 0 && now !== width) {
      width = now;
      container.replaceChildren(...[render(width)].flat());
    }
  };
  new ResizeObserver(update).observe(container);
  update();
}

function showTip(anchor, title, lines) {
  const tip = find("#tip");
  tip.replaceChildren(make("b", {}, title), ...lines.filter(Boolean).map((line) => make("span", {}, line)));
  tip.hidden = false;
  const room = 12;
  const left = Math.min(anchor.x + 14, window.innerWidth - tip.offsetWidth - room);
  const above = anchor.y - tip.offsetHeight - 14;
  tip.style.left = `${Math.max(room, left)}px`;
  tip.style.top = `${above > room ? above : anchor.y + 18}px`;
}

const hideTip = () => { find("#tip").hidden = true; };

function middleOf(element) {
  const box = element.getBoundingClientRect();
  return { x: box.x + box.width / 2, y: box.y };
}

// A row of buttons of which one is pressed.
function choices(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    make("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => press(value) }, text));
  function press(value) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
    onChoose(value);
  }
  return make("div", { class: "choices", role: "group", "aria-label": label }, ...buttons);
}
