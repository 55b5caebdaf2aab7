"""N-gram overlap against counting by hand."""

from dflash_lib.conversations.overlap import ngram_overlap, words


def test_words():
    assert words("Don't PANIC, it's 42 – naïve!") == ["don", "t", "panic", "it", "s", "42", "naïve"]


def test_overlap_by_hand():
    heldout = ["a b c d e".split(), "x y".split(), "p q r s".split()]
    training = ["z a b c z".split(), "c d e".split(), "q r s".split(), "a b".split()]
    result = ngram_overlap(heldout, iter(training), n=3)
    # held-out: abc bcd cde | (short) | pqr qrs; found: abc, cde, qrs
    assert (result.num_ngrams, result.num_found, result.num_short) == (5, 3, 1)
    assert result.share == 0.6
    assert result.shares == [2 / 3, None, 0.5]


def test_no_ngram_crosses_two_training_texts():
    assert ngram_overlap([[1, 2, 3, 4]], [[1, 2], [3, 4]], n=3).num_found == 0


def test_repeated_ngrams_count_once():
    result = ngram_overlap([[1, 1, 1, 1, 1]], [[1, 1, 1]], n=2)
    assert (result.num_ngrams, result.num_found) == (1, 1)


def test_nothing_long_enough():
    result = ngram_overlap([[1, 2]], [[1, 2, 3]], n=8)
    assert (result.share, result.num_short, result.shares) == (0.0, 1, [None])
