"use strict";
// A cursor that follows the pointer and the arrow keys, and a line of text that says what is there.
for (const box of document.querySelectorAll(".follow")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const drawn = box.querySelector("svg"), cursor = box.querySelector(".cursor"), say = box.parentElement.querySelector(".say");
  let at = data.at.length - 1;
  const show = index => {
    at = Math.max(0, Math.min(data.at.length - 1, index));
    const outer = box.getBoundingClientRect(), inner = drawn.getBoundingClientRect();
    cursor.style.left = inner.left - outer.left + data.at[at] * inner.width + "px";
    box.classList.add("live");
    say.textContent = data.say[at];
  };
  const go = () => {
    const row = data.go && document.getElementById(data.go[at]);
    if (!row) return;
    for (const other of document.querySelectorAll("tr.found")) other.classList.remove("found");
    row.classList.add("found");
    row.scrollIntoView({ block: "center" });
  };
  box.addEventListener("pointermove", event => {
    const inner = drawn.getBoundingClientRect(), share = (event.clientX - inner.left) / inner.width;
    let nearest = 0;
    data.at.forEach((place, i) => { if (Math.abs(place - share) < Math.abs(data.at[nearest] - share)) nearest = i; });
    show(nearest);
  });
  box.addEventListener("pointerleave", () => box.classList.remove("live"));
  box.addEventListener("blur", () => box.classList.remove("live"));
  box.addEventListener("click", go);
  box.addEventListener("keydown", event => {
    const page = Math.max(1, Math.round(data.at.length / 10));
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - page, PageDown: at + page, Home: 0, End: Infinity };
    if (event.key in to) { event.preventDefault(); show(to[event.key]); }
    if (event.key === "Enter") go();
  });
}
// Tables are sorted by the values of a column; what is unknown comes last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("thead th")], body = table.tBodies[0], first = [...body.rows];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const before = head.getAttribute("aria-sort"), numbers = head.classList.contains("number");
    const orders = numbers ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    const order = orders[(orders.indexOf(before) + 1) % 3];
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
    const value = row => row.cells[column].dataset.value;
    const sign = order === "descending" ? -1 : 1;
    const sorted = order === "none" ? first : [...first].sort((one, other) => {
      const a = value(one), b = value(other);
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return sign * (numbers ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    });
    body.append(...sorted);
  }));
}
