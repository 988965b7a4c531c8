// AVX-512 with VNNI, without bfloat16 instructions (Cascade Lake, Ice Lake, Tiger Lake).
#include "attention.h"
#include "avx512.h"
#include "avx512_fixed.h"
#include "avx512_integers.h"
#include "rows.h"

namespace mmjax {

const Products kAvx512Vnni = {multiply<Float32Lanes>,
                              multiply<Bfloat16Lanes>,
                              multiply<Int8DotLanes>,
                              multiply<Float32Int8Lanes>,
                              multiply_fixed,
                              attend_chunk<float>,
                              attend_chunk<bf16>,
                              norm_rows<float>,
                              norm_rows<bf16>,
                              rotate_rows<float>,
                              rotate_rows<bf16>,
                              kIntegerGroups<Uint4Codes, Uint4Bytes>,
                              kIntegerGroups<Uint8Codes, Uint8Bytes>,
                              {multiply_groups<Float32GroupLanes<Float8Codes>>,
                               multiply_groups<Bfloat16GroupLanes<Float8Codes>>,
                               nullptr},
                              "avx512_vnni"};

}  // namespace mmjax
