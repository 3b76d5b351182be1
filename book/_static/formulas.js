// A formula in a line of text that is wider than the line, as on a phone, scrolls inside itself and is not cut off.

(function () {
    function fit() {
        const formulas = [...document.querySelectorAll('article mjx-container:not([display="true"])')];
        for (const formula of formulas) {
            formula.classList.remove("wide");
            formula.removeAttribute("tabindex");
        }
        const wide = formulas.filter(formula => {
            const line = formula.closest("p, li, dd, figcaption, h1, h2, h3");
            return line && !formula.closest("table") && formula.getBoundingClientRect().width > line.clientWidth;
        });
        for (const formula of wide) {
            formula.classList.add("wide");
            formula.tabIndex = 0;
        }
    }

    window.addEventListener("load", () => {
        if (!window.MathJax || !MathJax.startup) return;
        MathJax.startup.promise.then(fit);
        window.addEventListener("resize", fit);
        document.addEventListener("toggle", fit, true);
    });
})();
