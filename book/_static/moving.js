// A histogram with a slider (dpcompanion/reproduction/moving.py): without this script it stands still at its last time.
(() => {
  "use strict";
  for (const figure of document.querySelectorAll("figure[data-moving]")) {
    const { frames, height, base } = JSON.parse(figure.dataset.moving);
    const bars = [...figure.querySelectorAll(".bars rect")], slider = figure.querySelector("input[type=range]");
    const show = () => {
      const frame = frames[Number(slider.value)];
      frame.bars.forEach((share, i) => {
        bars[i].setAttribute("y", base - height * share);
        bars[i].setAttribute("height", height * share);
      });
      figure.querySelector(".uniform").setAttribute("transform", `translate(${frame.uniform} 0)`);
      figure.querySelector(".said").textContent = frame.said;
      slider.setAttribute("aria-valuetext", frame.said);
    };
    slider.addEventListener("input", show);
    figure.querySelector(".control").hidden = false;
    show();
  }
})();
