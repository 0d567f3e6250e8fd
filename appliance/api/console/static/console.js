// Refreshes a page: requests its fragment regularly and replaces the old one.
const SECONDS = 2;
const place = document.querySelector("[data-live]");
const status = document.querySelector("[data-status]");

async function refresh() {
  const answer = await fetch(place.dataset.live, { cache: "no-store" });
  if (answer.status === 401) {
    location.assign("/console/login?ended=1");
    return false;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const text = await answer.text();
  const fragment = new DOMParser().parseFromString(text, "text/html").querySelector(".fragment");
  place.replaceChildren(fragment);
  say(fragment.dataset.says);
  return true;
}

// A screen reader announces changes of this text, so it is set only if it differs.
function say(words) {
  if (status.textContent !== words) status.textContent = words;
}

async function keepFresh() {
  for (;;) {
    await new Promise((done) => setTimeout(done, SECONDS * 1000));
    if (document.hidden) continue;
    try {
      if (!(await refresh())) return;
    } catch {
      say("The gateway does not answer; the page is out of date. Retrying.");
    }
  }
}

if (place !== null) keepFresh();
