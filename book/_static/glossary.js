// The meaning of a term (book/_ext/meanings.py writes it as the link's title) in a box under the link, on hover and on focus.
(() => {
  "use strict";
  const show = (link, box) => {
    box.textContent = link.dataset.meaning;
    box.hidden = false;
    const place = link.getBoundingClientRect(), width = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(place.left, width - box.offsetWidth - 8));
    box.style.left = `${left + window.scrollX}px`;
    box.style.top = `${place.bottom + window.scrollY + 4}px`;
  };

  window.addEventListener("DOMContentLoaded", () => {
    const links = [...document.querySelectorAll("article a[title]")].filter((link) => link.querySelector(".std-term"));
    if (!links.length) return;
    const box = Object.assign(document.createElement("div"), { id: "meaning", hidden: true });
    box.setAttribute("role", "tooltip");
    document.body.append(box);
    const hide = () => { box.hidden = true; };
    for (const link of links) {
      link.dataset.meaning = link.title;
      link.removeAttribute("title");
      link.classList.add("term");
      for (const event of ["mouseenter", "focus"]) {
        link.addEventListener(event, () => { link.setAttribute("aria-describedby", "meaning"); show(link, box); });
      }
      for (const event of ["mouseleave", "blur"]) link.addEventListener(event, hide);
    }
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  });
})();
