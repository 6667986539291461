// SPDX-License-Identifier: Apache-2.0
// Small comforts. Every page works without them.
"use strict";

// One box that chooses all sends of the page.
for (const place of document.querySelectorAll("[data-choose-all]")) {
  const boxes = [...place.closest("table").querySelectorAll("input[name=send]")];
  const all = document.createElement("input");
  all.type = "checkbox";
  all.addEventListener("change", () => boxes.forEach((box) => { box.checked = all.checked; }));
  const label = document.createElement("label");
  label.append(all, "all");
  place.append(label);
}

for (const form of document.querySelectorAll("form[method=post]")) {
  form.addEventListener("submit", (event) => {
    const verb = form.querySelector("input[name=verb]:checked");
    if (verb && form.dataset.confirm && !confirm(`${verb.value}: ${form.dataset.confirm}`)) {
      event.preventDefault();
      return;
    }
    // A second click would ask for the same again. Later, since the pressed button belongs to the form.
    setTimeout(() => form.querySelectorAll("button").forEach((button) => { button.disabled = true; }));
  });
}

// Browsers keep the pages of their history in memory, whatever they were told: none is shown after signing out.
const signOut = document.querySelector("form[action='/ui/sign-out']");
signOut?.addEventListener("submit", () => sessionStorage.setItem("signed out", "yes"));

// Coming back by the history finds the buttons as they were left.
addEventListener("pageshow", (event) => {
  if (event.persisted && sessionStorage.getItem("signed out")) {
    document.body.hidden = true;
    location.reload();
  }
  document.querySelectorAll("button:disabled").forEach((button) => { button.disabled = false; });
});
