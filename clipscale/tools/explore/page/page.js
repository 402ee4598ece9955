"use strict";
// Texts of the set reach the page as text nodes alone, never as markup.

const id = (name) => document.getElementById(name);
let model = null;
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

// Ask, and show the answer unless another question has been asked since. top: where the page is scrolled to then.
async function ask(address, top, show) {
  const mine = ++latest;
  say("Searching");
  const start = performance.now();
  try {
    const result = await answer(address);
    if (mine !== latest) return;
    show(result);
    window.scrollTo({ top });
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
      "a", { className: "card", href: `?picture=${row.number}`, title: `${row.caption}\n${row.part}, ${row.key}` }, picture,
      make("div", {},
        make("div", { className: "line" },
          make("span", { textContent: `${number + 1}` }),
          make("span", { className: "score", textContent: row.score === undefined ? "" : row.score.toFixed(3) })),
        make("p", { textContent: row.caption || row.key })),
    );
    card.onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a tab or window of its own
      event.preventDefault();
      go({ picture: row.number });
    };
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
  id("query").hidden = true;
  id("found").hidden = true;
  say("");
  id("hint").hidden = false;
}

function search(text, top) {
  ask(`search?text=${encodeURIComponent(text)}`, top, (result) => {
    id("query").hidden = true;
    pictures(`Pictures for “${text}”`, result.images);
  });
}

function look(number, top) {
  const name = encodeURIComponent(number);
  ask(`search/${name}`, top, (result) => {
    id("query").hidden = false;
    id("asked").src = `small/${name}`;
    id("about").textContent = result.sample.caption || result.sample.key;
    id("captions").replaceChildren(captions(result.texts));
    pictures("Pictures like it", result.images);
  });
}

// Show what the page's address asks for: ?text=..., ?picture=NUMBER, or nothing.
function show(top = 0) {
  const question = new URLSearchParams(location.search);
  const text = question.get("text") || "";
  id("text").value = text;
  document.title = `${text ? `${text}, ` : question.has("picture") ? `picture ${question.get("picture")}, ` : ""}clipscale explore`;
  if (question.has("picture")) look(question.get("picture"), top);
  else if (text.trim()) search(text, top);
  else start();
}

// Ask something else; Back returns to what is shown now, where it is scrolled to.
function go(question) {
  const address = location.pathname + (question ? `?${new URLSearchParams(question)}` : "");
  if (address !== location.pathname + location.search) {
    history.replaceState({ top: scrollY }, "");
    history.pushState(null, "", address);
  }
  show();
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
  show();
  document.body.classList.add("drawn");
}

history.scrollRestoration = "manual"; // the answer comes later
window.onpopstate = (event) => show(event.state?.top);
id("ask").onsubmit = (event) => { event.preventDefault(); go(id("text").value.trim() && { text: id("text").value }); };
id("count").onchange = () => show(scrollY);
begin();
