from ullage.report import words


def test_adjoining_ranges_are_joined() -> None:
    assert words.ranks([range(4)]) == "ranks 0-3"
    assert words.ranks([range(3, 4)]) == "rank 3"
    assert words.ranks([range(4, 8), range(4), range(12, 13)]) == "ranks 0-7, 12"


def test_a_share_that_is_there_is_never_nothing() -> None:
    assert words.share(1, 10**9) == "<1 %"
    assert words.share(0, 10**9) == "0 %"
    assert words.in_gib(512) == "<0.01 GiB"
    assert words.in_gib(0) == "0.00 GiB"


def test_parts_stay_whole() -> None:
    lines = words.whole(["a b c", "d e f", "g h i"], 12).split("\n")
    assert lines == ["a b c,", "d e f,", "g h i"]
    assert words.whole(["a b", "c d"], 40) == "a b, c d"
