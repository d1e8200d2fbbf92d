"""`python -m jaxsoft`: which implementations can be used here, and why the others cannot."""

import jax

import jaxsoft


def main() -> None:
    """Prints the list of implementations for JAX's default device."""
    print(f"jaxsoft {jaxsoft.__version__}, jax {jax.__version__}, on {jax.devices()[0].device_kind}")
    for name, reason in jaxsoft.implementations().items():
        print(f"  {name:<10} {'available' if reason is None else 'not available: ' + reason}")


if __name__ == "__main__":
    main()
