"""Tests of the table, the CSV, the JSON and the plot."""

import contextlib
import io
import itertools
import math

import pytest
import rich.console

from sympow_jax import plotting
from sympow_jax.evaluation import buckets, report

LENGTHS = (64, 256, 1024)


def make_rows(name, losses, *, train_context=256, documents=3, standard_error=0.1, **training):
    shared = {"standard_error": standard_error, "documents": documents}
    means = [
        buckets.Bucket(context_length=length, loss=loss, tokens=documents * length // 2, **shared)
        for length, loss in zip(LENGTHS, losses)
    ]
    training = {"preset": "conformal", "updates": 8, "update_tokens": 64, "data": "0a1b2c3d"} | training
    return report.make_rows(report.Run(run=name, train_context=train_context, **training), means)


def printed(rows):
    with contextlib.redirect_stdout(io.StringIO()) as file:
        report.print_table(rows, report.make_console())
    return file.getvalue()


def test_tables_have_a_column_for_each_run_and_that_of_one_its_perplexity():
    names = [f"a_rather_long_name_{index}" for index in range(6)]
    many = printed([row for name in names for row in make_rows(name, [2.0, 1.5, 1.25])])
    header = next(line for line in many.splitlines() if names[0] in line)
    assert all(name in header for name in names)
    text = printed(make_rows("a", [2.0, 1.5, 1.25]))
    assert text.isascii()
    assert "1.5000*" in text
    assert "2.0000*" not in text
    assert f"{math.exp(1.25):.3f}" in text
    assert "3 documents" in text


def test_table_on_a_terminal_does_not_read_a_name_as_markup_or_control():
    file = io.StringIO()
    rows = make_rows("[bold]\x1b[2J", [2.0, 1.5, 1.25]) + make_rows("b", [2.0, 1.5, 1.25])
    report.print_table(rows, rich.console.Console(file=file, force_terminal=True, width=100))
    assert r"[bold]\x1b[2J" in file.getvalue()


def drawn(monkeypatch, tmp_path, rows, *, saved=False):
    """Returns the axes that `write_plot` saves; `saved` writes the files, which takes a second."""
    figures = []
    save = plotting.save
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append((figure, path)))
    report.write_plot(tmp_path / "x.png", rows)
    if saved:
        save(*figures[0])
    else:
        figures[0][0].draw_without_rendering()
    return figures[0][0].axes[0]


def test_plot_overlays_the_runs_with_a_marker_per_bucket_and_their_training_contexts(monkeypatch, tmp_path):
    rows = make_rows("a", [2.0, 1.5, 1.25]) + make_rows("b", [2.5, 2.25, math.inf], train_context=1024)
    axes = drawn(monkeypatch, tmp_path, rows + make_rows("c", [math.nan] * 3))
    curves = [line for line in axes.lines if line.get_marker() != "None"]
    assert [line.get_xdata().tolist() for line in curves] == [list(LENGTHS)] * 3
    assert [line.get_ydata().tolist()[:2] for line in curves[:2]] == [[2.0, 1.5], [2.5, 2.25]]
    dashed = [line for line in axes.lines if line.get_marker() == "None"]
    assert [line.get_xdata()[0] for line in dashed] == [256, 1024]
    assert {
        "a\ntrained at 256",
        "b\ntrained at 1,024\nnot finite at 1,024",
        "c\ntrained at 256\nnot finite at 64, 256, 1,024",
        "trained at 256",
        "trained at 1,024",
    } <= {text.get_text() for text in axes.texts}
    assert axes.get_xscale() == "log"
    assert "nats per token" in axes.get_ylabel()
    assert "tokens" in axes.get_xlabel()


def test_plot_separates_labels_of_lines_that_end_together(monkeypatch, tmp_path):
    losses = [2.0, 1.5, 1.25]
    rows = [
        row for index in range(8) for row in make_rows(f"run{index}", losses, train_context=64 << index % 2)
    ]
    axes = drawn(monkeypatch, tmp_path, rows)
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().startswith("run")]
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) == 8
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))


def test_plot_shows_what_differs_in_training_and_one_color_per_preset(monkeypatch, tmp_path):
    losses = [2.0, 1.5, 1.25]
    rows = make_rows("a", losses, preset="sympow") + make_rows("b", losses, updates=4, data="unknown")
    axes = drawn(monkeypatch, tmp_path, rows, saved=True)
    assert {"a\n8 updates, data 0a1b2c3d", "b\n4 updates, data unknown"} <= {x.get_text() for x in axes.texts}
    curves = [line.get_color() for line in axes.lines if line.get_marker() != "None"]
    assert curves == [color for color, _ in plotting.styles(["sympow", "conformal"])]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
    assert report.training_differences(make_rows("a", losses) + make_rows("b", losses)) == {}


def test_a_pdf_has_no_title_of_the_figure(tmp_path):
    for titles in ({"title": "Panel"}, {"title": "Whole", "subtitle": "Part"}):
        figure, (axes,) = plotting.make()
        plotting.style(axes, x_label="", y_label="", **titles)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figure, "savefig", lambda path, **options: path.touch())
            plotting.save(figure, tmp_path / "x.png")
        texts = (axes.title, axes._left_title, *axes.texts)
        shown = [text for text in texts if text.get_text() and text.get_visible()]
        assert len(shown) == ("subtitle" not in titles)


def test_styles_of_presets_stay_and_others_differ():
    conformal, black = plotting.styles(["conformal", "softmax"])
    ours = plotting.styles(["softmax", "x", "conformal", "conformal", "y"])
    assert (ours[0], ours[2]) == (black, conformal)
    assert len(set(ours)) == 5


NAMES = {
    "$\\frac{$": "$\\frac{$",
    "a$b": "a$b",
    "_hidden": " _hidden",
    "\U0001f9e0\x1b漢": "\\U0001f9e0\\x1b\\u6f22",
    "x" * 255: "x" * 20 + " ... " + "x" * 35,
}


@pytest.mark.filterwarnings("error")
def test_plot_shows_names_as_they_are(monkeypatch, tmp_path):
    axes = drawn(
        monkeypatch,
        tmp_path,
        [row for name in NAMES for row in make_rows(name, [2.0, 1.5, 1.25])],
        saved=True,
    )
    for name, shown in NAMES.items():
        (text,) = (text for text in axes.texts if text.get_text() == plotting.plain(name))
        assert text._preprocess_math(text.get_text()) == (shown, False)
    figure = plotting.blank(width=4.0, height=3.0)
    panel = figure.subplots()
    for name in NAMES:
        panel.plot([0, 1], label=plotting.plain(name))
    legend = figure.legend()
    figure.savefig(tmp_path / "legend.png")
    assert [text.get_text() for text in legend.texts] == list(map(plotting.plain, NAMES))
