"""Small helpers without Leyden's nouns: ids, time, atomic files, signals."""
