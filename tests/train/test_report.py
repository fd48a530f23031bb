"""A report survives the disk, its target is judged, the committed file never names the machine, and pictures are
pictures."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from papyrax.train import figures, report
from papyrax.train.page import page
from papyrax.train.report import Figure, Number, Report, Table

META = {"system": "toy", "preset": "cpu", "seed": 3, "wall_s": 75.2, "start": "kept"}


def example(tmp_path):
    fig = figures.curves([0, 1, 2], {"ours": np.arange(6.0).reshape(2, 3), "theirs": [0, 1, 1]}, lines={"paper": 2.0})
    path = report.save_figure(fig, tmp_path / "figures" / "curve.png")
    return Report(
        claim="Ours is higher | than theirs.",
        shown=True,
        verdict="It is, by half.",
        numbers=[
            Number("return", np.float32(170.5), baseline=100, paper=168.0, unit="points", target=">= 168", spread=1.25),
            Number("loss", math.nan, target="<= 1"),
        ],
        tables=[Table("arms", ["arm", "score"], [["full", 0.123456], ["no KL", None]], note="one seed")],
        figures=[Figure(path, "Curve", "mean and band")],
        notes=["A note."],
    )


def test_write_then_read(tmp_path):
    made = example(tmp_path)
    report.write(made, tmp_path, META)
    back, meta = report.read(tmp_path)
    assert (back.claim, back.shown, back.verdict, list(back.notes)) == (made.claim, True, made.verdict, ["A note."])
    assert back.numbers[0].ours == 170.5 and back.numbers[0].reached is True
    assert math.isnan(back.numbers[1].ours) and back.numbers[1].reached is False
    assert back.figures[0].path == "figures/curve.png" and (tmp_path / back.figures[0].path).exists()
    assert meta["start"] == "kept" and meta["versions"]["jax"] and meta["versions"]["cores"] >= 1
    text = (tmp_path / "report.md").read_text()
    assert "| return (points) | 170.5 ± 1.25 | 100 | 168 | >= 168 | yes |" in text
    assert "![Curve](figures/curve.png)" in text and "1 min 15 s" in text and "| no KL | – |" in text
    assert "seed: 3" in text and "preset: cpu" in text
    assert not list(tmp_path.glob(".*")), "no temporary file stays behind"


@pytest.mark.parametrize(
    ("target", "ours", "met"),
    [
        ("> 1", 1, False),
        ("<= 2.5e-3", 0.0025, True),
        ("= 4", 4, True),
        ("about 4", 4, None),
        ("", 1, None),
        ("> 1", None, None),
    ],
)
def test_target(target, ours, met):
    assert Number("n", ours, target=target).reached is met


def test_a_target_that_was_judged_by_hand_wins():
    assert Number("n", 0, target="> 1", met=True).reached is True


def test_publish_merges_and_names_no_machine(tmp_path):
    made = example(tmp_path)
    report.publish(made, "toy", "smoke", tmp_path / "results", META)
    path = report.publish(made, "toy", "cpu", tmp_path / "results", META)
    data = json.loads(path.read_text())
    assert set(data["runs"]) == {"smoke", "cpu"}
    run = data["runs"]["cpu"]
    assert run["seed"] == 3 and run["wall_s"] == 75.2 and run["machine"]["cores"] >= 1
    assert run["numbers"][0]["met"] is True and run["numbers"][1]["ours"] == "nan"
    assert str(tmp_path) not in path.read_text()
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["toy.json"]


def test_publish_refuses_a_broken_file(tmp_path):
    (tmp_path / "toy.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        report.publish(example(tmp_path), "toy", "cpu", tmp_path, META)
    assert (tmp_path / "toy.json").read_text() == "{"


def test_read_tells_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="has not ended"):
        report.read(tmp_path)
    (tmp_path / "report.json").write_text('{"meta": {}}')
    with pytest.raises(ValueError, match="not a report"):
        report.read(tmp_path)


def test_table_rows_must_fit():
    with pytest.raises(ValueError, match=r"rows\[1\] of table 't' has 1 cells, wanted 2"):
        Table("t", ["a", "b"], [[1, 2], [1]])


def test_figures_draw_their_data(tmp_path):
    drawn = {
        "bars": figures.bars(["a", "b"], {"x": [1, 2], "y": [2, 1]}, errors={"x": [0.1, 0.2]}, ylabel="score"),
        "scatter": figures.scatter([0, 1, 2], [0, 2, 4], diagonal=True, groups=["u", "v", "u"]),
        "grid": figures.grid(np.linspace(0, 1, 3 * 4 * 4 * 3).reshape(3, 4, 4, 3), titles=["a", "b", "c"]),
        "heat": figures.heat(np.eye(3), rows=list("abc"), columns=list("def"), center=0.0),
    }
    assert drawn["scatter"].axes[0].get_title() == "r = 1.000"
    assert [p.get_height() for p in drawn["bars"].axes[0].patches] == [1, 2, 2, 1]
    for name, fig in drawn.items():
        with Image.open(report.save_figure(fig, tmp_path / f"{name}.png")) as picture:
            assert picture.size[0] > 200 and np.asarray(picture.convert("L")).std() > 0


def test_curves_average_over_seeds_and_skip_gaps():
    fig = figures.curves([0, 1, 2], {"a": [[0.0, 2.0, np.nan], [2.0, 4.0, np.nan]]})
    x, y = fig.axes[0].lines[0].get_data()
    np.testing.assert_array_equal(x, [0, 1])
    np.testing.assert_array_equal(y, [1, 3])
    with pytest.raises(ValueError, match=r"series 'a' must be \[seeds, 2\]"):
        figures.curves([0, 1], {"a": [1, 2, 3]})
    with pytest.raises(ValueError, match="at least one picture"):
        figures.grid([])


def test_film(tmp_path):
    frames = np.zeros((5, 8, 10, 3), np.uint8)
    frames[:, :, :, 0] = (np.arange(5) * 60)[:, None, None]
    with Image.open(report.save_film(frames, tmp_path / "film.gif", fps=20)) as film:
        assert film.n_frames == 5 and film.size == (10, 8) and film.info["duration"] == 50
        film.seek(4)
        assert abs(int(np.asarray(film.convert("RGB"))[0, 0, 0]) - 240) <= 8
    with pytest.raises(ValueError, match=r"got float64 \[5, 8, 10, 3\]"):
        report.save_film(frames / 255, tmp_path / "x.gif")


def test_page_lists_committed_results_runs_and_the_unfinished(tmp_path):
    run, other = tmp_path / "runs" / "toy" / "one", tmp_path / "runs" / "toy" / "two"
    run.mkdir(parents=True)
    other.mkdir()
    made = example(run)
    report.write(made, run, META)
    report.publish(made, "toy", "cpu", tmp_path / "results", META)
    text = page([run, other], tmp_path / "results", tmp_path / "out" / "index.html").read_text()
    assert 'src="../runs/toy/one/figures/curve.png"' in text and 'href="../runs/toy/one/report.md"' in text
    assert "170.5 ± 1.25" in text and '<td class="yes">yes</td>' in text
    assert "Runs without a report" in text and "two</a>" in text
    assert "No run" in page([], tmp_path / "none", tmp_path / "empty.html").read_text()
