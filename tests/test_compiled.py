"""The page and the plot of `benchmarks.compiled`."""

from xml.etree import ElementTree

from benchmarks.compiled_report import draw, page


def row(peak, time, gradients=0.0, **more):
    return {
        "peak": peak,
        "time": {"eager": time, "compile": time, **more.pop("over", {})},
        "gradients": gradients,
        **more,
    }


def test_the_page_says_what_is_wrong_refused_and_above_the_budget():
    ours = {"budget": 2**20, "predicted": 2**20, "mode": "inductor"}
    rows = {
        "eager": row(3 * 2**20, 1.0),
        "compile": row(2 * 2**20, 0.8),
        "blocks": row(2**20, 1.1),
        "budget 0.5": row(2**20, 0.9, gradients=0.7, slope=0.8),
        "budget 0.3": row(2**20, 0.9, gradients=0.7, slope=0.99),
        "inductor at blocks": row(2**20 + 2**18, 0.9, over={"blocks": 0.82}, **ours),
        "inductor at 45%": {"error": "InfeasibleBudgetError: too | small"},
    }
    report = {"device": "CPU", "models": {"net": {"rows": rows, "compiling": {}, "pairs": 3}}}
    text = page(report)
    assert "| budget 0.5 | 1.00 | 0.90 | 0.90 | 7e-01 (slope 0.80, wrong) | | | |" in text
    assert "| budget 0.3 | 1.00 | 0.90 | 0.90 | 7e-01 (slope 0.99) | | | |" in text
    assert "| 1.25 | 0.82 | 0e+00 |" in text
    assert "too   small" in text
    assert "1 of our peaks are higher" in text
    assert "by at most 25.00%; 1 of 1 are above the budget" in text
    assert "Of torch's memory budget, 1 of 2 give wrong gradients" in text
    assert ElementTree.fromstring(draw(report)).get("role") == "img"
    assert draw(report).count("<g transform") == 1 + 4 + 3  # a panel, the legend, the three ways of right gradients
