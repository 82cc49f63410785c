"""The texts of `PromptSim`: twelve rules of a shop's support desk, and sentences that do nothing.

A rule is recognised by its keywords, which no other rule and no symptom uses. `World` checks this.
To add a rule, add an entry to `RULES`.
"""

from __future__ import annotations

from benchmarks.promptsim.world import AnswerRule


def _rule(name: str, symptom: str, keywords: str, *clauses: str, forbids: bool = False) -> AnswerRule:
    """Return a rule. keywords: groups of synonyms, separated by "+", as in
    `greet greeting + name`.
    """
    groups = tuple(tuple(group.split()) for group in keywords.split("+"))
    return AnswerRule(name=name, clauses=clauses, keywords=groups, symptom=symptom, forbids=forbids)


RULES = (
    _rule(
        "greeting",
        "The customer was left anonymous.",
        "greet greeting + name",
        "Greet the customer by name.",
        "Begin with a greeting and the customer's own name, the name on the account.",
        "Always greet people by their name.",
        "Open with a friendly greeting that has the name in it.",
        "The first line must greet the writer by name.",
        "Use the name of the person when you greet them.",
    ),
    _rule(
        "order",
        "It stayed unclear which purchase was meant.",
        "order + number",
        "Ask for the order number.",
        "Request the number of the order.",
        "Find out the order number before anything else.",
        "Every answer must establish the order by its number.",
        "Make sure that you have the order number.",
        "Check which order it is by asking for its number.",
    ),
    _rule(
        "apology",
        "The tone was cold about the mishap.",
        "apologise apologize apology + inconvenience trouble",
        "Apologise for the inconvenience.",
        "Offer an apology for the trouble.",
        "Say that you apologise for any trouble.",
        "Include a short apology for the inconvenience caused.",
        "Apologize once, sincerely, for the trouble.",
        "Start by making an apology for the inconvenience.",
    ),
    _rule(
        "refund",
        "The buyer cannot tell when the money comes back.",
        "refund refunds + five 5",
        "State that refunds take five days.",
        "Explain that a refund arrives within 5 days.",
        "Tell the customer that each refund needs five working days.",
        "Mention the five days that a refund takes.",
        "Refunds are paid in 5 days: say so.",
        "Give five days as the time of a refund.",
    ),
    _rule(
        "tracking",
        "The parcel could not be followed.",
        "tracking + link",
        "Include the tracking link.",
        "Give the link for tracking the parcel.",
        "Add a tracking link to the answer.",
        "Paste the link to the tracking page.",
        "Each answer needs a link for tracking.",
        "Point to the tracking page with a link.",
    ),
    _rule(
        "steps",
        "The solution was one confusing block of text.",
        "numbered + steps",
        "Write the solution as numbered steps.",
        "Use numbered steps for instructions.",
        "Structure what has to be done in numbered steps.",
        "Present a list of steps, numbered from one.",
        "Give short numbered steps.",
        "Break the solution into steps that are numbered.",
    ),
    _rule(
        "survey",
        "The shop learned nothing about satisfaction.",
        "survey + invite invitation",
        "Invite the customer to the survey.",
        "Add an invitation to our survey.",
        "Close by inviting opinions: invite them to the survey.",
        "Finish with the survey invitation.",
        "Do your best to invite everybody to the survey.",
        "The last line is an invitation to take the survey.",
    ),
    _rule(
        "password",
        "A secret was demanded.",
        "password passwords + request",
        "Never request a password.",
        "Do not request the password.",
        "You must not request passwords.",
        "Request what you need, but never passwords.",
        "Under no circumstances request a password.",
        "Don't request any password.",
        forbids=True,
    ),
    _rule(
        "carrier",
        "The answer pointed a finger at the delivery firm.",
        "blame + carrier",
        "Do not blame the carrier.",
        "Never put the blame on the carrier.",
        "Don't blame the carrier for anything.",
        "The carrier is not to blame in any answer.",
        "Leave the carrier alone and never blame it.",
        "Blame neither the carrier nor the weather, and do not hint at it.",
        forbids=True,
    ),
    _rule(
        "language",
        "The reply was in a foreign tongue.",
        "same + language",
        "Reply in the same language.",
        "Use the same language as the customer.",
        "Keep to the same language that the ticket uses.",
        "Answer in whichever language was used, the same one throughout.",
        "Stay in the same language.",
        "The language of the answer is the same as the ticket's.",
    ),
    _rule(
        "summary",
        "Nothing showed that the complaint was understood.",
        "summarise summarize summary + problem",
        "Summarise the problem first.",
        "Begin with a summary of the problem.",
        "Summarize the problem in one sentence.",
        "Give a one-line summary of the problem.",
        "Restate and summarise what the problem is.",
        "Put a summary of the problem at the top.",
    ),
    _rule(
        "escalation",
        "A legal threat stayed on the first desk.",
        "escalate forward + manager",
        "Escalate legal threats to a manager.",
        "Forward threats to the manager.",
        "If somebody threatens to sue, escalate to a manager.",
        "A manager must see legal threats: forward them to the manager.",
        "Escalate to the manager when lawyers are mentioned.",
        "Forward anything legal to a manager.",
    ),
)

DISTRACTORS = (
    "Use a formal tone.",
    "Think carefully before you answer.",
    "Answer in at most one paragraph.",
    "Mention our opening hours.",
    "Use emojis where they fit.",
    "Avoid technical words.",
    "Wish a pleasant day.",
    "Praise the products of the shop.",
)
"""Plausible instructions that meet no rule."""

FLUFF = (
    "It is of the greatest importance that you always do your very best in everything that you do here.",
    "Remember that excellence is a habit and that every single interaction counts a great deal for all of us.",
    "As a world-class assistant you combine deep expertise with warmth, diligence and attention to detail.",
    "Take pride in your work, because outstanding quality is what sets us apart from everyone else in the field.",
)
"""Sentences that only make a prompt longer."""

SEED_PROMPT = "You answer the tickets of a shop."
COMPONENT_PROMPTS = {
    "plan": "You plan the answer to a ticket.",
    "search": "You look up what a ticket is about.",
    "write": "You write the answer to a ticket.",
}
