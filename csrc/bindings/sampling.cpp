#include "weightsync/sampling.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_sampling(py::module_& module) {
    module.def(
        "sample_tokens",
        [](std::uintptr_t scores_ptr, std::int64_t num_rows, std::int64_t vocab_size,
           std::int64_t row_stride, std::uintptr_t seeds_ptr, std::uintptr_t positions_ptr,
           std::uintptr_t noise_scales_ptr, std::uintptr_t tokens_ptr, int num_threads) {
            check_num_threads(num_threads);
            const SampleStep step{pointer<const float>(scores_ptr),
                                  num_rows,
                                  vocab_size,
                                  row_stride,
                                  pointer<const std::uint64_t>(seeds_ptr),
                                  pointer<const std::int64_t>(positions_ptr),
                                  pointer<const float>(noise_scales_ptr),
                                  pointer<std::int64_t>(tokens_ptr)};
            const py::gil_scoped_release released;
            sample_tokens(step, num_threads);
        },
        py::arg("scores_ptr"), py::arg("num_rows"), py::arg("vocab_size"), py::arg("row_stride"),
        py::arg("seeds_ptr"), py::arg("positions_ptr"), py::arg("noise_scales_ptr"),
        py::arg("tokens_ptr"), py::arg("num_threads"));
    module.def(
        "fill_gumbel_noise",
        [](std::uint64_t seed, std::int64_t position, std::int64_t vocab_size,
           std::uintptr_t noise_ptr) {
            const py::gil_scoped_release released;
            fill_gumbel_noise(seed, position, vocab_size, pointer<float>(noise_ptr));
        },
        py::arg("seed"), py::arg("position"), py::arg("vocab_size"), py::arg("noise_ptr"));
    module.def(
        "gumbel_of_each",
        [](std::uintptr_t bits_ptr, std::int64_t count, std::uintptr_t noise_ptr,
           std::uintptr_t low_ptr, std::uintptr_t high_ptr) {
            const py::gil_scoped_release released;
            gumbel_of_each(pointer<const std::uint32_t>(bits_ptr), count, pointer<float>(noise_ptr),
                           pointer<float>(low_ptr), pointer<float>(high_ptr));
        },
        py::arg("bits_ptr"), py::arg("count"), py::arg("noise_ptr"), py::arg("low_ptr"),
        py::arg("high_ptr"));
}

}  // namespace weightsync::bindings
