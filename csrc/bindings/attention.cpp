#include "weightsync/attention.hpp"

#include <pybind11/stl.h>

#include <array>

#include "bindings.hpp"
#include "weightsync/attention_math.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

// Pointers and sizes travel as two tuples in the order of the struct, so that a call per layer
// costs little; weightsync/native_attention.py is the only caller.
AttentionStep step_from(int dtype, float scale, const std::array<std::int64_t, 11>& sizes,
                        const std::array<std::uintptr_t, 10>& pointers) {
    if (dtype < 0 || dtype > static_cast<int>(FloatType::fp16)) {
        throw std::invalid_argument("attention: unknown dtype code " + std::to_string(dtype));
    }
    for (const std::uintptr_t address : pointers) {
        if (address == 0) throw std::invalid_argument("attention: a pointer is null");
    }
    AttentionStep step{};
    step.dtype = static_cast<FloatType>(dtype);
    step.scale = scale;
    step.num_rows = sizes[0];
    step.num_sequences = sizes[1];
    step.num_heads = sizes[2];
    step.num_kv_heads = sizes[3];
    step.head_dim = sizes[4];
    step.num_pages = sizes[5];
    step.page_size = sizes[6];
    step.table_width = sizes[7];
    step.query_stride = sizes[8];
    step.key_stride = sizes[9];
    step.value_stride = sizes[10];
    step.query = pointer<const void>(pointers[0]);
    step.key = pointer<const void>(pointers[1]);
    step.value = pointer<const void>(pointers[2]);
    step.output = pointer<void>(pointers[3]);
    step.cache_keys = pointer<void>(pointers[4]);
    step.cache_values = pointer<void>(pointers[5]);
    step.slot_mapping = pointer<const std::int64_t>(pointers[6]);
    step.query_starts = pointer<const std::int32_t>(pointers[7]);
    step.context_lens = pointer<const std::int32_t>(pointers[8]);
    step.block_tables = pointer<const std::int32_t>(pointers[9]);
    return step;
}

}  // namespace

void bind_attention(py::module_& module) {
    module.attr("ATTENTION_CHUNK") = kAttentionChunk;
    module.def(
        "attend_paged",
        [](int dtype, float scale, const std::array<std::int64_t, 11>& sizes,
           const std::array<std::uintptr_t, 10>& pointers, int num_threads) {
            check_num_threads(num_threads);
            const AttentionStep step = step_from(dtype, scale, sizes, pointers);
            const py::gil_scoped_release released;
            attend_paged(step, num_threads);
        },
        py::arg("dtype"), py::arg("scale"), py::arg("sizes"), py::arg("pointers"),
        py::arg("num_threads"));
}

}  // namespace weightsync::bindings
