// Refreshes the page, and asks before it acts. Everything on the page is written by the agent; this
// script adds no markup of its own.
"use strict";
const REFRESH_MS = 2000;
const notice = document.getElementById("notice");
const dialog = document.getElementById("confirm");
const token = document.querySelector('meta[name="firn-token"]')?.content;
let current = Date.now();
let busy = null;
// The button that the open question is about.
let asked = null;

function show(text, isBad) {
  notice.textContent = text;
  notice.className = isBad ? "bad" : "";
}

// What a user has opened stays open, and what has the focus keeps it.
function replaceMain(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  if (!fresh) throw new Error("the agent sent no page");
  const old = document.querySelector("main");
  for (const open of old.querySelectorAll("details[open]")) {
    const same = fresh.querySelector("#" + CSS.escape(open.id));
    if (same) same.open = true;
  }
  const focused = document.activeElement;
  const request = old.contains(focused) ? focused.dataset.request : null;
  old.replaceWith(document.adoptNode(fresh));
  if (request) [...fresh.querySelectorAll("button")].find((it) => it.dataset.request === request)?.focus();
}

async function refresh() {
  if (document.hidden || dialog.open) return;
  try {
    const answer = await fetch("page/body", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the agent answers ${answer.status}`);
    replaceMain(await answer.text());
    current = Date.now();
    document.documentElement.dataset.refreshed = "yes";
    if (!busy && notice.dataset.stale) { show("", false); delete notice.dataset.stale; }
  } catch (error) {
    if (busy) return;
    notice.dataset.stale = "yes";
    show(`This is ${Math.round((Date.now() - current) / 1000)} s old: ${error.message}`, true);
  }
}

// The failure or the facts that a reply has: one JSON value, or one for each step.
function lastReply(text) {
  const lines = text.trim().split("\n").map((line) => JSON.parse(line));
  return lines[lines.length - 1];
}

async function act(button) {
  const what = button.textContent.trim();
  busy = what;
  show(`${what} ...`, false);
  try {
    const answer = await fetch(`page/${button.dataset.action}`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-firn-token": token },
      body: button.dataset.request,
    });
    const reply = lastReply(await answer.text());
    if (reply.chain) throw new Error(reply.chain.join(": ") + (reply.hint ? ` (${reply.hint})` : ""));
    const failed = Object.entries(reply.facts?.failed ?? {});
    if (failed.length) throw new Error(failed.map(([vm, why]) => `${vm}: ${why}`).join("; "));
    show(`${what}: done`, false);
  } catch (error) {
    show(`${what}: ${error.message}`, true);
  }
  busy = null;
  refresh();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button || !token) return;
  document.getElementById("question").textContent = button.dataset.question;
  dialog.querySelector(".effect").textContent = button.dataset.effect;
  dialog.querySelector(".act").textContent = button.textContent.trim();
  asked = button;
  dialog.showModal();
});

// Escape closes the question without an answer.
dialog.querySelector("form").addEventListener("submit", (event) => {
  if (event.submitter?.value === "yes" && asked) act(asked);
  asked = null;
});

setInterval(refresh, REFRESH_MS);
refresh();
