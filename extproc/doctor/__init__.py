"""`kvcar doctor`: checks the whole chain from engines to Envoy and explains what it finds (docs/doctor.md)."""

from extproc.doctor.finding import Finding, Report, Severity
from extproc.doctor.options import DoctorOptions
from extproc.doctor.runner import examine

__all__ = ["DoctorOptions", "Finding", "Report", "Severity", "examine"]
