"""Small helpers that know nothing of Leyden's nouns: ids, time, atomic files, signals."""
