// A formula in a line of text that is wider than the line, as on a phone, scrolls inside itself and is not cut off.
// A table that is wider than the page scrolls too, says so, and can be scrolled by keyboard.

(function () {
    function fitTables() {
        for (const frame of document.querySelectorAll("article .pst-scrollable-table-container")) {
            const wide = frame.scrollWidth > frame.clientWidth + 1;
            frame.classList.toggle("wide", wide);
            if (!wide) {
                for (const name of ["tabindex", "role", "aria-label"]) frame.removeAttribute(name);
                continue;
            }
            frame.tabIndex = 0;
            frame.setAttribute("role", "region");
            frame.setAttribute("aria-label", "A table that scrolls sideways");
        }
    }

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
        fitTables();
        window.addEventListener("resize", fitTables);
        document.addEventListener("toggle", fitTables, true);
        if (!window.MathJax || !MathJax.startup) return;
        MathJax.startup.promise.then(fit);
        window.addEventListener("resize", fit);
        document.addEventListener("toggle", fit, true);
    });
})();
