"""Seeded text of a domain that the built-in draft was not trained on: SQL of a shop.
`python -m tests.support.domains 1500 > shop.sql` writes 1500 statements."""

from __future__ import annotations

import random
import sys

TABLES = {
    "customers": ("id", "name", "email", "country", "created_at"),
    "orders": ("id", "customer_id", "status", "total_cents", "placed_at"),
    "order_items": ("order_id", "product_id", "quantity", "price_cents"),
    "products": ("id", "title", "category", "price_cents", "stock"),
    "payments": ("id", "order_id", "method", "amount_cents", "paid_at"),
}
STATES = ("pending", "paid", "shipped", "returned", "cancelled")
COUNTRIES = ("DE", "FR", "GB", "US", "JP", "BR")
NAMED = ("name", "email", "title", "category", "method")


def statement(rng: random.Random) -> str:
    table = rng.choice(list(TABLES))
    columns = TABLES[table]
    kind = rng.randrange(4)
    if kind == 0:
        some = ", ".join(rng.sample(columns, rng.randint(1, 3)))
        return (
            f"SELECT {some}\nFROM {table}\nWHERE {equals(rng, columns)}\n"
            f"ORDER BY {rng.choice(columns)} DESC\nLIMIT {rng.choice((10, 20, 50, 100))};\n"
        )
    if kind == 1:
        return (
            "SELECT c.country, COUNT(*) AS orders, SUM(o.total_cents) AS total\n"
            "FROM orders AS o\nJOIN customers AS c ON c.id = o.customer_id\n"
            f"WHERE o.{equals(rng, TABLES['orders'])}\nGROUP BY c.country\n"
            f"HAVING COUNT(*) > {rng.randrange(1, 50)};\n"
        )
    if kind == 2:
        where = f"WHERE {columns[0]} = {rng.randrange(1, 9999)}"
        return f"UPDATE {table}\nSET {equals(rng, columns)}\n{where};\n"
    values = ", ".join(value(rng, column) for column in columns)
    return f"INSERT INTO {table} ({', '.join(columns)})\nVALUES ({values});\n"


def equals(rng: random.Random, columns: tuple[str, ...]) -> str:
    column = rng.choice(columns)
    return f"{column} = {value(rng, column)}"


def value(rng: random.Random, column: str) -> str:
    if column == "status":
        return f"'{rng.choice(STATES)}'"
    if column == "country":
        return f"'{rng.choice(COUNTRIES)}'"
    if column.endswith("_at"):
        return f"'2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}'"
    return f"'{column}_{rng.randrange(1, 500)}'" if column in NAMED else str(rng.randrange(1, 5000))


def sql(statements: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(statement(rng) for _ in range(statements))


if __name__ == "__main__":
    sys.stdout.write(sql(int(sys.argv[1])))
