"""The processors that are compiled for, and LLVM's passes over what is compiled."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import platform
from typing import NamedTuple

__all__ = ["LEVELS", "Target"]


class Target(NamedTuple):
    """A kind of processor.

    Attributes:
        machine: its architecture, as ``platform.machine()`` names it.
        triple, cpu: as LLVM has them.
        features: what it has besides what every processor of the kind ``cpu`` has, as LLVM lists it.
    """

    machine: str
    triple: str
    cpu: str
    features: str

    @classmethod
    def host(cls) -> Target:
        """Return the processor of this process."""
        import llvmlite.binding as llvm  # not for commands that load nothing

        features = llvm.get_host_cpu_features().flatten()
        return cls(platform.machine(), llvm.get_process_triple(), llvm.get_host_cpu_name(), features)

    def has(self, feature: str) -> bool:
        """Return whether it lists a feature ("f16c")."""
        return f"+{feature}" in self.features.split(",")

    def runs(self, other: Target) -> bool:
        """Return whether it has all that machine code for another asks for."""
        needed = [feature.removeprefix("+") for feature in other.features.split(",") if feature]
        return self.machine == other.machine and all(map(self.has, needed))

    def compile(self, text: str) -> bytes:
        """Return the object file of a module in LLVM's intermediate representation.

        Raises:
            RuntimeError: LLVM refuses it.
        """
        import llvmlite.binding as llvm

        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        generator = llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, reloc="pic", codemodel="jitdefault", jit=True
        )
        module = llvm.parse_assembly(text)
        module.triple = self.triple
        module.data_layout = str(generator.target_data)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        passes = llvm.create_pass_builder(generator, options)
        passes.getModulePassManager().run(module, passes)
        result: bytes = generator.emit_object(module)
        return result


_LINUX = "unknown-linux-gnu"
_V3 = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2"
LEVELS = {
    "x86-64-v3": Target("x86_64", f"x86_64-{_LINUX}", "x86-64-v3", _V3),
    "x86-64": Target("x86_64", f"x86_64-{_LINUX}", "x86-64", ""),
    "aarch64": Target("aarch64", f"aarch64-{_LINUX}", "generic", ""),
}
"""What a wheel brings object files for (tools/prebuild.py), of one architecture the best first."""
