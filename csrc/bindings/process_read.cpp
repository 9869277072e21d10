#include "weightsync/process_read.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_process_read(py::module_& module) {
    module.def(
        "read_process_segments",
        [](int pid, std::uintptr_t table_ptr, std::int64_t num_segments, int num_threads,
           std::uintptr_t cancel_ptr, std::uintptr_t progress_ptr) {
            check_num_threads(num_threads);
            const CallControl control = call_control(cancel_ptr, progress_ptr);
            const py::gil_scoped_release released;
            return read_process_segments(pid, pointer<const Segment>(table_ptr), num_segments,
                                         num_threads, control);
        },
        py::arg("pid"), py::arg("table_ptr"), py::arg("num_segments"), py::arg("num_threads"),
        py::arg("cancel_ptr") = 0, py::arg("progress_ptr") = 0);
}

}  // namespace weightsync::bindings
