import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: { ...globals.browser, ...globals.node, uPlot: "readonly" } },
    rules: {
      "no-unused-vars": "error", eqeqeq: "error", "no-var": "error", "prefer-const": "error", "no-shadow": ["error", { builtinGlobals: false }],
      "no-restricted-properties": ["error", { property: "innerHTML", message: "texts are set as texts" }, { property: "outerHTML", message: "texts are set as texts" },
        { property: "insertAdjacentHTML", message: "texts are set as texts" }],
      "no-eval": "error", "no-implied-eval": "error", "max-lines": ["error", 400], "max-lines-per-function": ["error", { max: 70, skipComments: true }], "max-params": ["error", 7],
    },
  },
];
