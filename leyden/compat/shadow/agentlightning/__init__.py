"""Found by child processes of a program under `leyden.compat`: puts Leyden in the place of
`agentlightning`.
"""

from leyden.compat.finder import take_over

take_over("agentlightning")
