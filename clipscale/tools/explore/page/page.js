"use strict";
// Texts of the set reach the page as text nodes alone, never as markup.

const id = (name) => document.getElementById(name);
let model = null;
let asked = null; // the number of the picture that is looked at
let latest = 0; // number of the last question; answers to earlier ones are dropped

function make(tag, values = {}, ...children) {
  const node = Object.assign(document.createElement(tag), values);
  node.append(...children);
  return node;
}

async function answer(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function say(text, bad = false) {
  id("hint").hidden = true;
  id("status").hidden = !text;
  id("status").textContent = text;
  id("status").className = bad ? "bad" : "";
}

// Ask, and show the answer unless another question has been asked since.
async function ask(address, show) {
  const mine = ++latest;
  say("Searching");
  const start = performance.now();
  try {
    const result = await answer(address);
    if (mine !== latest) return;
    show(result);
    const seconds = ((performance.now() - start) / 1000).toFixed(2);
    say(`${model.samples.toLocaleString("en")} samples compared in ${seconds} s`);
  } catch (error) {
    if (mine === latest) say(error.message === "Failed to fetch" ? "clipscale explore has ended" : error.message, true);
  }
}

function grid(rows) {
  if (!rows.length) return make("p", { className: "none", textContent: "No picture has features." });
  const list = make("div", { className: "grid" });
  rows.forEach((row, number) => {
    const picture = make("img", {
      src: `small/${row.number}`, alt: row.caption || row.key, loading: "lazy",
    });
    picture.onerror = () => picture.replaceWith(make("span", { className: "missing", textContent: "not readable" }));
    const card = make(
      "button", { className: "card", type: "button", title: `${row.caption}\n${row.part}, ${row.key}` }, picture,
      make("div", {},
        make("div", { className: "line" },
          make("span", { textContent: `${number + 1}` }),
          make("span", { className: "score", textContent: row.score === undefined ? "" : row.score.toFixed(3) })),
        make("p", { textContent: row.caption || row.key })),
    );
    card.onclick = () => look(row.number, row.caption || row.key, picture.src);
    list.append(card);
  });
  return list;
}

function pictures(title, rows) {
  id("found").hidden = false;
  id("what").textContent = title;
  id("pictures").replaceChildren(grid(rows.slice(0, Number(id("count").value))));
}

// Without a question: the hint alone.
function start() {
  latest += 1;
  asked = null;
  id("query").hidden = true;
  id("found").hidden = true;
  say("");
  id("hint").hidden = false;
}

function search(text) {
  if (!text.trim()) return void start();
  id("query").hidden = true;
  asked = null;
  history.replaceState(null, "", `#${encodeURIComponent(text)}`);
  ask(`search?text=${encodeURIComponent(text)}`, (result) =>
    pictures(`Pictures for “${text}”`, result.images));
}

function look(number, about, source) {
  asked = number;
  id("text").value = "";
  history.replaceState(null, "", " ");
  ask(`search/${number}`, (result) => {
    id("query").hidden = false;
    id("asked").src = source;
    id("about").textContent = about;
    id("captions").replaceChildren(captions(result.texts));
    pictures("Pictures like it", result.images);
    window.scrollTo({ top: 0, behavior: "smooth" });
  });
}

function captions(rows) {
  if (!rows.length) return make("p", { className: "none", textContent: "No text has features." });
  const seen = new Set();
  const unlike = rows.filter((row) => !seen.has(row.caption) && seen.add(row.caption)).slice(0, 8);
  return make("ol", { className: "rows" }, ...unlike.map((row) =>
    make("li", { title: `${row.part}, ${row.key}` },
      make("span", { textContent: row.caption || row.key }), make("b", { textContent: row.score.toFixed(3) }))));
}

async function begin() {
  model = await (await fetch("model")).json();
  id("model").append(`${model.title} `, make("small", { textContent: `${model.samples.toLocaleString("en")} samples` }));
  let text = "";
  try { text = decodeURIComponent(location.hash.slice(1)); } catch { /* a broken link */ }
  id("text").value = text;
  search(text);
}

id("ask").onsubmit = (event) => { event.preventDefault(); search(id("text").value); };
id("count").onchange = () => (asked !== null ? look(asked, id("about").textContent, id("asked").src) : search(id("text").value));
begin();
